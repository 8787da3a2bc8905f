"""The CUDA kernels give the bits of the plain C++ kernel.

tests/optim/test_cuda_on_cpu.py asks the same of their source, compiled for the host.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from infinity.optim import cpu_adam, cuda_adam
from infinity.optim.moments import zero_moments
from infinity.rules import RULES
from infinity.tiers.device import CpuDevice
from infinity.tiers.digests import fingerprint_by_torch, fingerprint_on_device
from support.adam_arrays import GUARD, Array
from support.cuda_kernels import (
    GRADS,
    CudaKernels,
    check_fingerprints,
    check_frozen,
    check_guards,
    check_halves,
    check_numbers_of_elements,
    check_sums,
    check_updates,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device"),
    pytest.mark.skipif(not cuda_adam.available(), reason=cuda_adam.why_not() or "they are there"),
]

SIZES = (0, 1, 3, 4, 7, 8, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 100_003)
FORMATS = ("fp32", "remainder", "master", "master_fp16")
GB = 1 << 30


class InDeviceMemory:
    """`values` between guards, `offset` elements after a boundary of 64 bytes."""

    def __init__(self, values: Array, offset: int = 0) -> None:
        self._dtype, self._start = values.dtype, 64 + offset * values.itemsize
        self._end = self._start + values.nbytes
        host = np.full(self._end + 64, GUARD, np.uint8)
        host[self._start : self._end] = values.view(np.uint8)
        self._memory = torch.from_numpy(host).cuda()
        assert self._memory.data_ptr() % 64 == 0
        self.address = self._memory.data_ptr() + self._start

    def get(self) -> Array:
        torch.cuda.synchronize()
        array = self._memory.cpu().numpy()[self._start : self._end].view(self._dtype)
        check_guards(array)
        return array


@pytest.fixture
def kernels() -> CudaKernels:
    import infinity.native._adam_cuda as native

    return CudaKernels(native, InDeviceMemory)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("format", FORMATS)
def test_updates(kernels: CudaKernels, format: str, rule: str, moments: str) -> None:
    check_updates(kernels, format, rule, moments, SIZES)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_random_bits_are_of_the_number_of_the_element(kernels: CudaKernels, moments: str) -> None:
    check_numbers_of_elements(kernels, moments)


@pytest.mark.parametrize("dtype", GRADS)
def test_sums(kernels: CudaKernels, dtype: str) -> None:
    check_sums(kernels, dtype, (*SIZES, 300 * 4096, 5_000_011))


def test_fingerprints(kernels: CudaKernels) -> None:
    check_fingerprints(kernels, (*SIZES, 70_001, 300 * 4096))


def test_halves(kernels: CudaKernels) -> None:
    check_halves(kernels, SIZES)


def test_frozen_parameters(kernels: CudaKernels) -> None:
    check_frozen(kernels, (1, 2, 3, 37, 4000))


def test_a_fingerprint_on_the_device_has_the_bits_of_the_hosts() -> None:
    memory = torch.randint(0, 256, (8 * 100_001,), dtype=torch.uint8)
    expected = CpuDevice().fingerprint(memory)
    for found in (fingerprint_on_device(memory.cuda()), fingerprint_by_torch(memory.cuda())):
        assert int(found) % (1 << 64) == expected


def test_every_half_and_every_remainder() -> None:
    """All 2^32 bit patterns of an fp32 master, 2^26 at a time, against torch's integer operations."""
    for start in range(-(1 << 31), 1 << 31, 1 << 26):
        master = torch.arange(start, start + (1 << 26), dtype=torch.int32, device="cuda").view(torch.float32)
        param, remainder = cuda_adam.split_master(master)
        expected = cpu_adam.split_master_torch(master)
        assert torch.equal(param.view(torch.int16), expected[0].view(torch.int16))
        assert torch.equal(remainder, expected[1])
        joined = cuda_adam.join_master(param, remainder).view(torch.int32)
        assert torch.equal(joined, torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32)))


def test_the_work_goes_to_the_current_stream() -> None:
    """Behind a stream that is kept busy: the gradient is written there just before, and read in order."""
    n, stream = 1 << 22, torch.cuda.Stream()
    hyper = cpu_adam.Hyper(lr=0.5, weight_decay=0.0)
    # The first turn loads kernels and allocates memory, which may wait for the device.
    for cycles in (1, 500_000_000):
        param, grad, *moments = [torch.zeros(n, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            grad.fill_(1.0)
            cuda_adam.update_flat(param, None, grad, moments, [], hyper, 1)
            total = cuda_adam.sum_of_squares(grad)
            waited = stream.query()
        stream.synchronize()
        assert total.item() == n and (param == -0.5).all()
        del total  # its memory serves the next turn
    assert not waited


def test_sums_follow_each_other_without_a_number_of_the_host() -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (5000, 0, 77)]
    expected, total = 0.0, torch.zeros((), dtype=torch.float64, device="cuda")
    for tensor in tensors:
        expected = cpu_adam.sum_of_squares(tensor, 0.5, expected)
        total = cuda_adam.sum_of_squares(tensor.cuda(), 0.5, total)
    assert total.item() == expected


def test_more_than_2_to_the_32_elements() -> None:
    n, hyper = (1 << 32) + 1000, cpu_adam.Hyper("sgd", lr=1.0, weight_decay=0.0)
    needed = 7 * n + n // 256  # bytes of what is allocated below
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed + 8 * GB:  # other tests may use the device too
        pytest.skip(f"needs {(needed + 8 * GB) / GB:.0f} GiB of free memory on the device")
    try:
        grad = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        grad[-1000:] = 3.0
        assert cuda_adam.sum_of_squares(grad).item() == 9000.0
        param = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        remainder = torch.zeros(n, dtype=torch.int16, device="cuda")
        codes = torch.zeros(n, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(-(-n // 256), dtype=torch.uint8, device="cuda")
        cuda_adam.update_flat(param, remainder, grad, [codes], [scales], hyper, 1)
        assert (param[-1000:] == -3.0).all()
        assert not any(part.any() for part in param[:-1000].split(1 << 30))  # which torch indexes with 32 bits
    finally:
        grad = param = remainder = codes = scales = None
        torch.cuda.empty_cache()  # for the other processes


def test_tensors_elsewhere_are_refused() -> None:
    hyper, tensors = cpu_adam.Hyper(), [torch.zeros(8) for _ in range(4)]
    for here in range(4):
        mixed = [tensor if k == here else tensor.cuda() for k, tensor in enumerate(tensors)]
        with pytest.raises(ValueError, match="is on cpu: pass"):
            cuda_adam.update_flat(mixed[0], None, mixed[1], mixed[2:], [], hyper, 1)
    param = torch.zeros(8, dtype=torch.float64, device="cuda")
    grad, *moments = [tensor.cuda() for tensor in tensors[1:]]
    with pytest.raises(ValueError, match=r"param is torch\.float64"):
        cuda_adam.update_flat(param, None, grad, moments, [], hyper, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_need_not_be_the_current_one() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert cuda_adam.sum_of_squares(values.to("cuda:1")).item() == cpu_adam.sum_of_squares(values)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="one CUDA device, here cuda:0"):
        cuda_adam.split_master(values.to("cuda:0"), (values.to("cuda:1").bfloat16(), values.to("cuda:1").short()))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_slices_of_flat_tensors_are_updated_as_the_whole(moments: str) -> None:
    n, generator = 10 * 256 + 77, torch.Generator(device="cuda").manual_seed(4)
    param = torch.randn(n, generator=generator, device="cuda")
    grad = torch.randn(n, generator=generator, device="cuda")
    states, scales = zero_moments("adamw", n, moments)  # type: ignore[arg-type]
    whole = [param.clone(), *(t.cuda() for t in (*states, *scales))]
    parts = [tensor.clone() for tensor in whole]
    hyper = cpu_adam.Hyper(lr=0.1)
    cuda_adam.update_flat(whole[0], None, grad, whole[1:3], whole[3:], hyper, 1, key=9)
    for begin in range(0, n, 768):
        some = [tensor[begin : begin + 768] for tensor in (parts[0], grad, *parts[1:3])]
        blocks = [scale[begin // 256 : (begin + 768) // 256] for scale in parts[3:]]
        cuda_adam.update_flat(some[0], None, some[1], some[2:], blocks, hyper, 1, key=9, first=begin)
    for ours, theirs in zip(parts, whole, strict=True):
        assert torch.equal(ours, theirs)

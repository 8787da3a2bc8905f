"""The CUDA kernels' source, compiled for the host, is bit-identical to the plain kernel. It checks indices, tails,
warps and blocks without a GPU; tests/gpu/test_cuda_adam.py checks them on a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch

import infinity.native
from infinity.cli.report import collect
from infinity.optim import cpu_adam, cuda_adam
from infinity.optim.moments import zero_moments
from support.adam_arrays import HYPER, make_problem
from support.cuda_kernels import (
    CudaKernels,
    check_fingerprints,
    check_frozen,
    check_halves,
    check_numbers_of_elements,
    check_sums,
    check_updates,
)

HERE = Path(__file__).parent / "cuda_on_cpu"
SOURCES = Path(__file__).parents[2] / "csrc"
SOURCE = SOURCES / "adam/cuda/launch.cu"
BUILT = SOURCES.parent / "build/cuda_on_cpu"
SIZES = (0, 1, 3, 4, 5, 31, 33, 127, 129, 255, 256, 257, 1028, 4099)


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The module infinity.native._adam_cuda, with kernels that run on the CPU; compiled where its sources are new."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernels for the host")
    pybind11 = pytest.importorskip("pybind11", reason="pybind11, which the build needs, is not installed here")
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{HERE}"]
    python = sysconfig.get_path("include")
    host = ["-O0", f"-I{pybind11.get_include()}", f"-I{python}", '-DINFINITY_CUDA_ARCHITECTURES="80-real 90"']
    host += ['-DINFINITY_CUDA_TOOLKIT="none"', str(HERE / "host.cpp")]
    kernels = ["-O1", "-Werror=conversion-null", "-x", "c++", str(SOURCE)]
    commands = [[compiler, *flags, *part, "-c"] for part in (host, kernels)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    file = BUILT / fingerprint(version, sys.version, pybind11.__version__, *chain(*commands)) / "_adam_cuda.so"
    if not file.exists():
        compile_into(file, commands)
    spec = importlib.util.spec_from_file_location("_adam_cuda", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def fingerprint(*texts: str) -> str:
    """Return a name for the module made of all C++ sources in the way that `texts` say."""
    digest = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(path for folder in (HERE, SOURCES) for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_into(file: Path, commands: list[list[str]]) -> None:
    """Compile both parts side by side and link them; another run sees the whole module or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        parts = [f"{folder}/{number}.o" for number in range(len(commands))]
        running = [
            subprocess.Popen([*command, "-o", to], stderr=subprocess.PIPE, text=True)
            for command, to in zip(commands, parts, strict=True)
        ]
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        subprocess.run([commands[0][0], "-shared", *parts, "-o", f"{folder}/linked"], check=True)
        os.replace(f"{folder}/linked", file)


@pytest.fixture(scope="session")
def kernels(module: ModuleType) -> CudaKernels:
    return CudaKernels(module)


def test_updates(kernels: CudaKernels, format: str, rule: str, moments: str) -> None:
    check_updates(kernels, format, rule, moments, SIZES)


def test_random_bits_are_of_the_number_of_the_element(kernels: CudaKernels, moments: str) -> None:
    check_numbers_of_elements(kernels, moments)


def test_sums(kernels: CudaKernels, grad_dtype: str) -> None:
    check_sums(kernels, grad_dtype, (0, 1, 31, 32, 33, 4095, 4096, 4097, 70_001, 300 * 4096))


def test_fingerprints(kernels: CudaKernels) -> None:
    check_fingerprints(kernels, (*SIZES, 70_001, 300 * 4096))


def test_halves(kernels: CudaKernels) -> None:
    check_halves(kernels, SIZES)


def test_frozen_parameters(kernels: CudaKernels) -> None:
    check_frozen(kernels, (1, 2, 3, 37))


def test_what_cuda_refuses_is_an_error_in_its_words(kernels: CudaKernels) -> None:
    with pytest.raises(RuntimeError, match="cudaSetDevice: invalid device ordinal"):
        kernels.native.split(4096, 8192, 16384, 4, device=3, stream=0)


def test_what_is_built_in(kernels: CudaKernels) -> None:
    assert kernels.native.ARCHITECTURES == ["sm_80", "sm_90", "compute_90"]


def test_arguments_are_checked_as_the_cpus_are(kernels: CudaKernels) -> None:
    problem = make_problem("fp32", "fp32", 10)
    for wrong, message in (
        ({"step": 0}, "step is 0"),
        ({"beta1": 1.0}, r"beta1 is 1\.0"),
        ({"first": 1}, "first is 1"),
        ({"n": -1}, "n is -1"),
        ({"grad": problem.address("param")}, "grad overlaps param"),
        ({"moments": [1, 2]}, "not aligned"),
        ({"format": "fp64"}, "format is 'fp64'"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.native.update(**(problem.arguments() | HYPER | {"device": 0, "stream": 0} | wrong))


# ---- infinity.optim.cuda_adam, with CPU tensors in the place of CUDA's ----


@pytest.fixture
def wrapped(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "infinity.native._adam_cuda", module)
    monkeypatch.setattr(infinity.native, "_adam_cuda", module, raising=False)
    monkeypatch.setattr(cuda_adam, "_device", lambda name, tensor: tensor.device)
    monkeypatch.setattr(cuda_adam, "_where", lambda device: {"device": 0, "stream": 0})
    cuda_adam.why_not.cache_clear()
    yield
    cuda_adam.why_not.cache_clear()


@pytest.mark.usefixtures("wrapped")
def test_update_flat_is_that_of_the_cpu(moments: str) -> None:
    assert cuda_adam.available() and not cuda_adam.why_not()
    n, hyper = 1000, cpu_adam.Hyper(lr=1e-2, weight_decay=0.1)
    results = []
    for module in (cpu_adam, cuda_adam):
        generator = torch.Generator().manual_seed(1)
        param, remainder = module.split_master(torch.randn(n, generator=generator))
        states, scales = zero_moments("adamw", n, moments)  # type: ignore[arg-type]
        for step in (1, 2):
            grad = torch.randn(n, generator=generator).bfloat16()
            given = param, remainder, grad, states, scales, hyper, step
            module.update_flat(*given, grad_scale=0.5, key=step, first=512)
        results.append([module.join_master(param, remainder), *states, *scales])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("wrapped")
def test_sums_follow_each_other_without_a_number_of_the_host() -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (5000, 0, 77)]
    expected, total = 0.0, torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        expected = cpu_adam.sum_of_squares(tensor, 0.5, expected)
        total = cuda_adam.sum_of_squares(tensor, 0.5, total)
    assert total.shape == () and total.item() == expected
    assert cuda_adam.sum_of_squares(tensors[0], initial=2.0).item() == cpu_adam.sum_of_squares(tensors[0], initial=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("wrapped")
def test_sums_of_ranges_have_the_bits_of_single_sums(dtype: torch.dtype) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(2)).to(dtype)
    ranges = [(0, 4096), (4096, 4096), (4103, 17_000), (17_000, 20_000), (5, 6)]
    out = torch.full((len(ranges),), torch.nan, dtype=torch.float64)
    cuda_adam.sums_of_squares(values, ranges, out)
    assert out.tolist() == [cpu_adam.sum_of_squares(values[start:stop]) for start, stop in ranges]
    for empty in ([], [(5, 5)]):
        cuda_adam.sums_of_squares(values, empty, out[: len(empty)].fill_(torch.nan))
        assert out[: len(empty)].tolist() == [0.0] * len(empty)
    for wrong in ((3, 2), (0, 20_001)):
        with pytest.raises(ValueError, match=r"pass ranges of the 20000 elements"):
            cuda_adam.sums_of_squares(values, [wrong], out[:1])


@pytest.mark.parametrize("nbytes", [0, 1, 300])
def test_a_result_is_stored_on_the_host(module: ModuleType, nbytes: int) -> None:
    result, host = torch.arange(302, dtype=torch.int64).to(torch.uint8), torch.zeros(302, dtype=torch.uint8)
    module.store(result.data_ptr() + 1, host.data_ptr() + 1, nbytes, device=0, stream=0)
    assert torch.equal(host[1 : nbytes + 1], result[1 : nbytes + 1]) and not host[nbytes + 1 :].any() and host[0] == 0


@pytest.mark.usefixtures("wrapped")
def test_tensors_that_do_not_fit_are_refused() -> None:
    param, grad, hyper = torch.zeros(8), torch.zeros(8), cpu_adam.Hyper("sgd", momentum=0.9)
    for moment, message in (
        (torch.zeros(9), "9 elements where 8"),
        (torch.zeros(8, device="meta"), "is on meta: pass a CPU tensor"),
        (torch.zeros(8, 2)[:, 0], "not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda_adam.update_flat(param, None, grad, [moment], [], hyper, 1)


@pytest.mark.usefixtures("wrapped")
def test_report_says_what_is_built_in() -> None:
    assert collect()["cuda"]["own kernels"] == "built by nvcc none for sm_80, sm_90, compute_90"


@pytest.mark.usefixtures("wrapped")
def test_devices_too_old_are_said(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(module, "ARCHITECTURES", ["sm_100", "compute_100"])
    assert cuda_adam.why_not() == "this build's CUDA kernels are for sm_100 and later, and device 0 is sm_90"
    assert not cuda_adam.available()

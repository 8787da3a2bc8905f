"""`deepspeed.ops.aio`: bytes arrive whole at any offset, size and alignment, and every failure is an error."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from infinity.deepspeed.ops import aio_handle as module
from infinity.deepspeed.ops.aio import AsyncIOBuilder
from infinity.deepspeed.ops.aio_handle import AioHandle, aio_read, aio_write, deepspeed_memcpy

import infinity.deepspeed as deepspeed
from infinity.errors import StorageError, UsageError
from infinity.native import _aio
from support.mounts import mount

BYTE = torch.empty(0, dtype=torch.uint8)
SIZE = 5 * 4096
FEW = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def handle() -> AioHandle:
    return AioHandle(block_size=4096, queue_depth=4, intra_op_parallelism=2)


@pytest.fixture
def faults() -> Iterator[Callable[[list[dict[str, object]]], None]]:
    """Faults of the engines that are opened from now on."""
    yield _aio._inject
    _aio._inject([])
    _aio._release_held()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def content_of(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def filled(path: Path, count: int = SIZE, seed: int = 9) -> torch.Tensor:
    """Write a file, and return its bytes."""
    values = random_bytes(count, seed)
    path.write_bytes(values.numpy().tobytes())
    return values


# -- the surface -------------------------------------------------------------------------------------------------------


def test_the_builder_gives_deepspeeds_handle() -> None:
    """Both builders are one, and the handle has DeepSpeed's defaults and returns its arguments."""
    assert deepspeed.ops.op_builder.AsyncIOBuilder is deepspeed.ops.aio.AsyncIOBuilder is AsyncIOBuilder
    assert AsyncIOBuilder().is_compatible() and AsyncIOBuilder.NAME == "async_io"
    loaded = AsyncIOBuilder().load(verbose=False)
    default = loaded.aio_handle()
    assert (default.get_block_size(), default.get_queue_depth()) == (1 << 20, 128)
    assert not default.get_single_submit() and not default.get_overlap_events()
    assert default.get_intra_op_parallelism() == 1
    own = loaded.aio_handle(1000, 8, True, True, 3)
    assert (own.get_block_size(), own.get_queue_depth()) == (1000, 8)
    assert own.get_single_submit() and own.get_overlap_events()
    assert own.get_intra_op_parallelism() == 3 and own.get_alignment() == 3 * 512


def test_operators_without_a_counterpart_are_refused() -> None:
    gds = deepspeed.ops.op_builder.GDSBuilder()
    assert not gds.is_compatible()
    with pytest.raises(UsageError, match=r"gds_handle\) has no counterpart here: use AsyncIOBuilder"):
        gds.load()
    with pytest.raises(AttributeError, match="TransformerBuilder has no counterpart"):
        deepspeed.ops.op_builder.TransformerBuilder  # noqa: B018


def test_calls_return_deepspeeds_counts(handle: AioHandle, tmp_path: Path) -> None:
    """Synchronous calls complete pending operations too, and count them."""
    path, buffer = str(tmp_path / "file"), random_bytes(SIZE)
    assert handle.sync_pwrite(buffer, path) == 1
    assert handle.async_pread(buffer.clone(), path) == 0
    assert handle.pread(buffer.clone(), path, True, True) == 0
    assert handle.sync_pread(buffer.clone(), path) == 3
    assert handle.wait() == 0
    assert handle.pwrite(buffer, path, True, False) == 1
    assert handle.async_pwrite(buffer, path) == handle.pread(buffer, path, False, True, 0) == 0
    assert handle.wait() == 2
    assert handle.read(buffer, path, True) == handle.write(buffer, path, True) == 0


def test_locked_tensors_are_aligned_and_known(handle: AioHandle) -> None:
    """Views of locked memory count as pinned, until it is freed; the bytes stay valid as long as a tensor."""
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(3, dtype=torch.bfloat16))
    assert tensor.shape == (1000,) and tensor.dtype == torch.bfloat16 and tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor) and handle.is_pinned(tensor[5:].view(5, -1))
    assert not handle.is_pinned(torch.zeros(4)) and not handle.free_cpu_locked_tensor(torch.zeros(4))
    assert AioHandle().free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor) and tensor.fill_(2).sum() == 2000
    other = handle.new_cpu_locked_tensor(10, BYTE)
    assert other.data_ptr() in module._locked
    del other
    assert not module._locked
    assert handle.new_cpu_locked_tensor(0, tensor).shape == (0,)


def test_pinned_memory_of_the_host_is_known(handle: AioHandle) -> None:
    """Memory that torch has pinned counts, and memory of the device does not."""
    storage = SimpleNamespace(data_ptr=lambda: 0)
    for on_device in (False, True):
        tensor: Any = SimpleNamespace(is_cuda=on_device, is_pinned=lambda: True, untyped_storage=lambda: storage)
        assert handle.is_pinned(tensor) != on_device


# -- bytes -------------------------------------------------------------------------------------------------------------


@FEW
@given(
    offset=st.integers(0, 2 * 4096 + 3),
    size=st.integers(0, 2 * 4096 + 3),
    start=st.sampled_from([0, 1, 512, 4095, 4096]),
    block=st.sampled_from([1, 512, 4096, 5000]),
    locked=st.booleans(),
)
def test_every_byte_and_no_other_is_transferred(
    tmp_path: Path, offset: int, size: int, start: int, block: int, locked: bool
) -> None:
    """Writes and reads of views at any place: the rest of the file and of the memory stays as it is."""
    handle, path = AioHandle(block, 4, intra_op_parallelism=2), tmp_path / "file"
    memory = handle.new_cpu_locked_tensor(SIZE, BYTE) if locked else torch.empty(SIZE, dtype=torch.uint8)
    expected = filled(path)
    memory.copy_(random_bytes(SIZE, seed=1))
    expected[offset : offset + size] = memory[start : start + size]
    assert handle.sync_pwrite(memory[start : start + size], str(path), offset) == 1
    assert torch.equal(content_of(path), expected)
    memory.fill_(7)
    assert handle.sync_pread(memory[start : start + size], str(path), offset) == 1
    assert torch.equal(memory[start : start + size], expected[offset : offset + size])
    assert (memory[:start] == 7).all() and (memory[start + size :] == 7).all()


OPERATIONS = st.tuples(st.booleans(), st.integers(0, 9000), st.integers(0, 9000), st.integers(1, 9000))


@FEW
@given(operations=st.lists(OPERATIONS, min_size=2, max_size=6), locked=st.booleans())
def test_operations_without_wait_have_the_result_of_their_order(
    tmp_path: Path, operations: list[tuple[bool, int, int, int]], locked: bool
) -> None:
    """Reads and writes that overlap in the file and in memory, and one `wait`."""
    handle, path = AioHandle(4096, 4, intra_op_parallelism=2), tmp_path / "file"
    memory = handle.new_cpu_locked_tensor(SIZE, BYTE) if locked else torch.empty(SIZE, dtype=torch.uint8)
    in_file, in_memory = filled(path), random_bytes(SIZE, seed=1)
    memory.copy_(in_memory)
    for reads, offset, start, size in operations:
        if reads:
            handle.async_pread(memory[start : start + size], str(path), offset)
            in_memory[start : start + size] = in_file[offset : offset + size]
        else:
            handle.async_pwrite(memory[start : start + size], str(path), offset)
            in_file[offset : offset + size] = in_memory[start : start + size]
    assert handle.wait() == len(operations)
    assert torch.equal(content_of(path), in_file) and torch.equal(memory, in_memory)


def test_a_file_is_copied_without_wait(handle: AioHandle, tmp_path: Path) -> None:
    """A read, a write of the same memory and a read of the written file: each starts after the one before."""
    size = 8 << 20
    values = filled(tmp_path / "from", size)
    (tmp_path / "to").write_bytes(bytes(size))
    first, second = (handle.new_cpu_locked_tensor(size, BYTE) for _ in range(2))
    handle.async_pread(first, str(tmp_path / "from"))
    handle.async_pwrite(first, str(tmp_path / "to"))
    handle.async_pread(second, str(tmp_path / "to"))
    assert handle.wait() == 3
    assert torch.equal(second, values)


def test_an_overlapping_operation_waits_for_the_one_before(faults: Any, tmp_path: Path) -> None:
    """A read of bytes whose write has not completed does not start, and one of other bytes does."""
    path = tmp_path / "file"
    filled(path)
    faults([{"where": "event", "hold": True, "only": "write", "times": 1}])
    handle = AioHandle(4096, 4)
    memory, other = (handle.new_cpu_locked_tensor(4096, BYTE) for _ in range(2))
    handle.async_pwrite(memory, str(path), 4096)
    handle.async_pread(other, str(path), 8192)
    thread = threading.Thread(target=handle.async_pread, args=(other, str(path), 5000))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    _aio._release_held()
    thread.join()
    assert handle.wait() == 3
    assert torch.equal(other, content_of(path)[5000 : 5000 + 4096])


def test_memory_that_is_not_pinned_is_copied(handle: AioHandle, tmp_path: Path) -> None:
    """A write takes the values at its call; a read sets them in `wait`."""
    path, buffer = str(tmp_path / "file"), torch.arange(3000, dtype=torch.int64)
    handle.async_pwrite(buffer, path)
    buffer.zero_()
    handle.wait()
    handle.async_pread(buffer, path)
    assert not buffer.any()
    assert handle.wait() == 1 and torch.equal(buffer, torch.arange(3000))


def test_locked_memory_is_transferred_in_place(handle: AioHandle, tmp_path: Path) -> None:
    path, buffer = str(tmp_path / "file"), handle.new_cpu_locked_tensor(4096, BYTE)
    handle.async_pwrite(buffer, path)
    (operation,) = handle._pending
    assert operation._memory.data_ptr() == buffer.data_ptr()
    handle.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_every_dtype_and_shape(handle: AioHandle, dtype: torch.dtype, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    for shape in ((), (3, 0), (3, 5, 7)):
        values = torch.randn(shape).to(dtype)
        target = torch.zeros(shape).to(dtype)
        assert handle.sync_pwrite(values, path) == handle.sync_pread(target, path) == 1
        assert torch.equal(target.view(torch.uint8) if shape else target, values.view(torch.uint8) if shape else values)


@pytest.mark.parametrize("locked", [False, True])
def test_autograd_sees_a_read(handle: AioHandle, locked: bool, tmp_path: Path) -> None:
    """A read into a tensor that backward needs is an in-place edit, as is one into a parameter."""
    path = str(tmp_path / "file")
    handle.sync_pwrite(torch.ones(4), path)
    saved = handle.new_cpu_locked_tensor(4, torch.empty(0)) if locked else torch.zeros(4)
    loss = (torch.ones(4, requires_grad=True) * saved).sum()
    handle.sync_pread(saved, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    parameter = torch.nn.Parameter(torch.zeros(4))
    handle.sync_pread(parameter, path)
    assert parameter.requires_grad and parameter.sum() == 4
    with torch.inference_mode():
        inferred = torch.zeros(4)
    handle.sync_pread(inferred, path)
    assert inferred.sum() == 4


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_DIRECT])
def test_a_descriptor_of_the_caller_is_written_and_stays_open(flags: int, handle: AioHandle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    expected = filled(path)
    fd = os.open(path, flags)
    first, second = random_bytes(777, seed=1), random_bytes(4096, seed=2)
    assert handle.async_pwrite(first, fd, 333) == handle.async_pwrite(second, fd=fd, file_offset=8192) == 0
    assert handle.wait() == 2
    expected[333 : 333 + 777], expected[8192 : 8192 + 4096] = first, second
    assert torch.equal(content_of(path), expected)
    os.close(fd)  # raises if it was closed


def test_writing_leaves_no_descriptor_open(handle: AioHandle, tmp_path: Path) -> None:
    for _ in range(3):
        handle.sync_pwrite(random_bytes(5000), str(tmp_path / "file"))
        handle.async_pread(random_bytes(5000), str(tmp_path / "file"))
        with pytest.raises(StorageError):
            handle.sync_pread(random_bytes(5001), str(tmp_path / "file"))
    assert any(path.samefile(tmp_path / "file") for path in Path("/proc/self/fd").iterdir() if path.exists())
    handle.wait()
    assert not any(path.samefile(tmp_path / "file") for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_functions_without_a_handle(tmp_path: Path) -> None:
    path, values = str(tmp_path / "file"), torch.randn(2000)
    target = torch.zeros(2000)
    assert aio_write(values, path, 4096, 4, False, False, True) == 0
    assert aio_read(target, path, 4096, 4, False, False, True) == 0
    assert torch.equal(target, values)
    assert deepspeed_memcpy(target, values * 2) == 0 and torch.equal(target, values * 2)
    with pytest.raises(UsageError, match=r"dest has shape \(2000,\) and torch.float32, and src \(3,\)"):
        deepspeed_memcpy(target, torch.ones(3))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(4, 4).t(), r"buffer has shape \(4, 4\), and its elements are not consecutive"),
        (torch.zeros(1).expand(4), "not consecutive"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "not consecutive"),
        (torch.zeros(4, device="meta"), "buffer is on meta: pass a tensor on the CPU or a CUDA device"),
        (b"bytes", "buffer is a bytes: pass a tensor"),
    ],
    ids=["transposed", "expanded", "conjugated", "meta", "bytes"],
)
def test_tensors_that_cannot_be_used_are_refused(buffer: Any, message: str, handle: AioHandle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for call in (handle.sync_pwrite, handle.async_pwrite, handle.sync_pread, handle.async_pread):
        with pytest.raises(UsageError, match=message):
            call(buffer, str(path))
    assert not path.exists() and handle.wait() == 0


def test_files_that_cannot_be_used_are_refused(handle: AioHandle, tmp_path: Path) -> None:
    path, buffer = tmp_path / "file", random_bytes(100)
    filled(path, 150)
    for call in (handle.sync_pread, handle.async_pread, lambda *args: handle.read(args[0], args[1], False, *args[2:])):
        with pytest.raises(FileNotFoundError, match="missing"):
            call(buffer, str(tmp_path / "missing"))
        with pytest.raises(StorageError, match="has 150 bytes, and a read of 100 bytes at offset 51 ends after them"):
            call(buffer, str(path), 51)
        with pytest.raises(StorageError, match="is neither a file nor a disk"):
            call(buffer, str(tmp_path))
    with pytest.raises(UsageError, match="file_offset is -1"):
        handle.async_pwrite(buffer, str(path), -1)
    with pytest.raises(IsADirectoryError):
        handle.async_pwrite(buffer, str(tmp_path))
    with pytest.raises(UsageError, match="needs one of filename and fd"):
        handle.async_pwrite(buffer, str(path), fd=1)
    for flags, message in ((os.O_RDONLY, "open for reading only"), (os.O_WRONLY | os.O_APPEND, "has O_APPEND")):
        fd = os.open(path, flags)
        with pytest.raises(UsageError, match=message):
            handle.async_pwrite(buffer, fd)
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        handle.async_pwrite(buffer, fd)
    with pytest.raises(UsageError, match="block_size is 0"):
        AioHandle(block_size=0)
    assert handle.wait() == 0 and path.stat().st_size == 150


@pytest.mark.parametrize("locked", [False, True])
def test_a_failed_operation_raises_in_wait_once(locked: bool, faults: Any, tmp_path: Path) -> None:
    """The error has path, offset and size. The other operations are complete."""
    path = tmp_path / "file"
    values = filled(path)
    faults([{"where": "event", "error": errno.EIO, "only": "read", "after": 1, "times": 1}])
    handle = AioHandle(4096, 1)
    buffers = [handle.new_cpu_locked_tensor(4096, BYTE) if locked else torch.empty_like(values[:4096]) for _ in "123"]
    for number, buffer in enumerate(buffers):
        handle.async_pread(buffer, str(path), 4096 * number)
    with pytest.raises(OSError, match="read of 4096 bytes at offset 4096") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO and caught.value.filename == str(path)
    assert handle.wait() == 0
    assert torch.equal(buffers[0], values[:4096]) and torch.equal(buffers[2], values[8192 : 8192 + 4096])


def test_an_operation_on_the_bytes_of_a_failed_one_is_not_started(faults: Any, tmp_path: Path) -> None:
    """Memory that a failed read should have filled is not written to another file."""
    filled(tmp_path / "from", 4096)
    faults([{"where": "event", "error": errno.EIO, "only": "read", "times": 1}])
    handle = AioHandle(4096, 1)
    buffer = handle.new_cpu_locked_tensor(4096, BYTE)
    handle.async_pread(buffer, str(tmp_path / "from"))
    with pytest.raises(OSError, match="Input/output error"):
        handle.async_pwrite(buffer, str(tmp_path / "to"))
    with pytest.raises(OSError, match="Input/output error"):
        handle.wait()
    assert (tmp_path / "to").stat().st_size == 0


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
    try:
        handle = AioHandle(4096, 4)
        path = str(folder / "file")
        assert handle.async_pwrite(random_bytes(1 << 20), path) == 0
        with pytest.raises(OSError, match="No space left on device") as caught:
            handle.wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == path
        with pytest.raises(OSError, match="No space left on device"):
            handle.write(random_bytes(1 << 20), path, False)
        assert handle.wait() == 0
    finally:
        unmount()


@pytest.mark.parametrize("call", ["read", "pread"])
def test_validation_finds_bytes_that_changed_on_the_way(call: str, faults: Any, tmp_path: Path) -> None:
    filled(tmp_path / "file")
    faults([{"where": "event", "flip": True, "only": "read", "times": -1}])
    handle = AioHandle(4096, 4)
    arguments = (True,) if call == "read" else (True, False)
    with pytest.raises(StorageError, match=r"does not hold the 4,096 bytes at offset 4,096"):
        getattr(handle, call)(random_bytes(4096), str(tmp_path / "file"), *arguments, 4096)


def test_a_deleted_handle_completes_its_operations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes are written, and a warning says that nobody learned of errors."""
    values = random_bytes(1 << 20)
    handle = AioHandle(4096, 4)
    handle.async_pwrite(values, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        del handle
        gc.collect()
    assert re.search(r"with 1 operations that nobody waited for: call wait\(\)", caplog.text)
    assert torch.equal(content_of(tmp_path / "file"), values)

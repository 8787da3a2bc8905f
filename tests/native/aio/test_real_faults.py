"""Real failures: full file systems, devices with errors, files that are truncated, sealed or limited in size."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.native import _aio

BLOCK = 4096
PIECES = 16
NBYTES = PIECES * BLOCK
PLACES = pytest.mark.parametrize("at", [0, PIECES // 2, PIECES - 1], ids=["first", "middle", "last"])


def fill_up(path: Path) -> None:
    """Fill the free space."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for nbytes in (1 << 20, 1 << 16, BLOCK):
            with contextlib.suppress(OSError):
                while os.write(fd, bytes(nbytes)):
                    os.fsync(fd)
    finally:
        os.close(fd)


@PLACES
def test_no_space_for_one_block(
    small_disk: Path, store: Any, memory: Any, scramble: Any, engine: Any, mode: str, at: int
) -> None:
    """On a full file system, every block of a sparse file can be overwritten, except a hole."""
    disk, buffer, io = store(NBYTES, mode, small_disk), memory(NBYTES), engine(queue_depth=1)
    with disk.path.open("r+b") as file:
        for block in set(range(PIECES)) - {at}:
            file.seek(block * BLOCK)
            file.write(b"o" * BLOCK)
        os.fsync(file.fileno())
    fill_up(small_disk / "filler")
    buffer[:] = values = scramble(NBYTES)

    request = io.write(disk.file, 0, buffer.address, NBYTES)
    with pytest.raises(OSError, match=f"write of {BLOCK} bytes at offset {at * BLOCK}, part of a") as caught:
        request.wait(10)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(disk.path)
    assert request.bytes_done == at * BLOCK
    expected = values[: at * BLOCK] + bytes(BLOCK) + b"o" * (NBYTES - (at + 1) * BLOCK)
    assert disk.content() == expected

    target = memory(NBYTES)
    assert io.read(disk.file, 0, target.address, NBYTES).wait(10) == NBYTES
    assert target[:] == expected
    os.unlink(small_disk / "filler")
    assert io.write(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    assert disk.content() == values


def run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine cannot do that: {error}")


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Callable[..., tuple[_aio.File, str]]]:
    """device(image) -> a block device that keeps its bytes in the file `image`, and its path"""
    with contextlib.ExitStack() as undo:

        def make(image: Path, mode: str) -> tuple[_aio.File, str]:
            if os.geteuid() != 0:
                pytest.skip("only root may set up a loop device")
            path = run("losetup", "--find", "--show", str(image))
            undo.callback(subprocess.run, ["losetup", "--detach", path], check=False)
            fds = [os.open(path, os.O_RDWR), os.open(path, os.O_RDWR | os.O_DIRECT)]
            os.posix_fadvise(fds[0], 0, 0, os.POSIX_FADV_RANDOM)  # blocks that are read ahead together fail together
            for fd in fds:
                undo.callback(os.close, fd)
            return _aio.File(fds[1] if mode == "direct" else -1, fds[0], path), path

        yield make


@PLACES
def test_a_device_that_cannot_be_read(
    tmp_path: Path, device: Any, memory: Any, scramble: Any, engine: Any, mode: str, at: int
) -> None:
    """The device's image is truncated: reads behind its end return EIO, like a bad sector."""
    image, buffer, io = tmp_path / "image", memory(NBYTES), engine(queue_depth=1)
    image.write_bytes(values := scramble(NBYTES))
    file, path = device(image, mode)
    os.truncate(image, at * BLOCK)
    request = io.read(file, 0, buffer.address, NBYTES)
    with pytest.raises(OSError, match=f"error: read of {BLOCK} bytes at offset {at * BLOCK}, part of a") as caught:
        request.wait(10)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
    assert request.bytes_done == at * BLOCK
    assert buffer[: at * BLOCK] == values[: at * BLOCK]
    if at > 0:
        assert io.read(file, 0, buffer.address, at * BLOCK).wait(10) == at * BLOCK


def test_a_device_that_cannot_be_written(
    small_disk: Path, device: Any, memory: Any, scramble: Any, engine: Any, mode: str
) -> None:
    """The device's image is sparse, and its file system has no space left."""
    image, buffer, io = small_disk / "image", memory(NBYTES), engine(queue_depth=1)
    at = PIECES // 2
    with image.open("wb") as file:
        file.write(bytes(at * BLOCK))
        file.truncate(NBYTES)
        os.fsync(file.fileno())
    disk, path = device(image, mode)
    fill_up(small_disk / "filler")
    buffer[:] = values = scramble(NBYTES)
    request = io.write(disk, 0, buffer.address, NBYTES)
    with pytest.raises(OSError, match=f"write of {BLOCK} bytes at offset {at * BLOCK}, part of a") as caught:
        request.wait(10)
    # A write through the page cache learns of the device's errors as EIO.
    assert caught.value.errno in ((errno.EIO, errno.ENOSPC) if mode == "direct" else (errno.EIO,))
    assert caught.value.filename == path
    assert request.bytes_done == at * BLOCK
    target = memory(at * BLOCK)
    assert io.read(disk, 0, target.address, at * BLOCK).wait(10) == at * BLOCK
    assert target[:] == values[: at * BLOCK]


@pytest.mark.parametrize("size", [0, BLOCK, 3 * BLOCK + 1, NBYTES - 1])
def test_a_file_that_is_cut_during_a_read(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str, size: int
) -> None:
    """The file is truncated after the first piece was read and before the others are submitted."""
    faults({"where": "event", "hold": True})
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine(queue_depth=1)
    values = disk.fill(scramble(NBYTES))
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    while buffer[:BLOCK] != values[:BLOCK]:
        os.sched_yield()
    disk.truncate(size)
    _aio._release_held()
    with pytest.raises(OSError, match=rf"ended at or before offset {max(size, BLOCK)} .*now {size} bytes"):
        request.wait(10)
    assert request.bytes_done == max(size, BLOCK)
    assert buffer[: request.bytes_done] == values[: request.bytes_done]


def test_a_file_that_is_cut_again_and_again(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    """A read is complete and correct, or fails because the file ended."""
    nbytes = 64 * BLOCK
    disk, buffer, io = store(nbytes, mode), memory(4 * nbytes), engine(threads=2)
    values = scramble(nbytes)
    for turn in range(20):
        disk.fill(values)
        requests = [io.read(disk.file, 0, buffer.address + i * nbytes, nbytes) for i in range(4)]
        disk.truncate(turn * BLOCK)
        for i, request in enumerate(requests):
            try:
                request.wait(10)
            except OSError as error:
                assert error.errno == errno.EIO
                assert "the file ended at or before offset" in str(error)
            else:
                assert buffer[i * nbytes : (i + 1) * nbytes] == values


def test_a_write_makes_a_file_that_was_cut_longer(
    store: Any, memory: Any, scramble: Any, engine: Any, mode: str
) -> None:
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine()
    disk.fill(scramble(NBYTES))
    disk.truncate(BLOCK + 1)
    buffer[:] = values = scramble(NBYTES, 1)
    assert io.write(disk.file, 2 * BLOCK, buffer.address, 3 * BLOCK + 1).wait(10) == 3 * BLOCK + 1
    assert disk.content() == scramble(NBYTES)[: BLOCK + 1] + bytes(BLOCK - 1) + values[: 3 * BLOCK + 1]


def test_a_file_that_may_not_be_written(memory: Any, scramble: Any, engine: Any) -> None:
    """Writes to a sealed file fail with EPERM; reads work."""
    buffer, io = memory(NBYTES), engine()
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, values := scramble(NBYTES))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        file = _aio.File(-1, fd, "sealed")
        with pytest.raises(PermissionError, match=f"write of {BLOCK} bytes at offset 0.*sealed") as caught:
            io.write(file, 0, buffer.address, NBYTES).wait(10)
        assert caught.value.errno == errno.EPERM
        assert io.read(file, 0, buffer.address, NBYTES).wait(10) == NBYTES
        assert buffer[:] == values
    finally:
        os.close(fd)


@pytest.mark.parametrize("limit", [1, BLOCK, 5 * BLOCK + 1000])
def test_a_limit_on_the_size_of_files(store: Any, memory: Any, scramble: Any, engine: Any, limit: int) -> None:
    """The kernel makes a short write up to the limit, and rejects the rest (ulimit -f)."""
    disk, buffer, io = store(0, "buffered"), memory(NBYTES), engine(block_size=8 * BLOCK)
    buffer[:] = values = scramble(NBYTES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        request = io.write(disk.file, 0, buffer.address, 8 * BLOCK)
        with pytest.raises(OSError, match=f"write of {8 * BLOCK - limit} bytes at offset {limit}, part of") as caught:
            request.wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert request.bytes_done == limit
    assert disk.content() == values[:limit]


@pytest.mark.parametrize("depth", [2, 8])
def test_good_and_bad_ones_at_once(store: Any, memory: Any, scramble: Any, engine: Any, mode: str, depth: int) -> None:
    """The kernel accepts a batch up to a rejected request; those before and after it succeed."""
    count, io = 24, engine(queue_depth=depth)
    disk, sealed, buffer = store(count * BLOCK, mode), store(count * BLOCK, mode), memory(count * BLOCK)
    fd = os.open(sealed.path, os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0))
    read_only = _aio.File(fd if mode == "direct" else -1, fd, str(sealed.path))
    buffer[:] = values = scramble(count * BLOCK)
    try:
        first = io.write(disk.file, 0, buffer.address, count * BLOCK)  # so that what follows is submitted in batches
        requests = [
            io.write(read_only if i % 3 else disk.file, i * BLOCK, buffer.address + i * BLOCK, BLOCK)
            for i in range(count)
        ]
        assert first.wait(10) == count * BLOCK
        for i, request in enumerate(requests):
            if i % 3 == 0:
                assert request.wait(10) == BLOCK
                continue
            with pytest.raises(OSError) as caught:
                request.wait(10)
            assert (caught.value.errno, caught.value.filename) == (errno.EBADF, str(sealed.path))
    finally:
        os.close(fd)
    assert disk.content() == values
    assert sealed.content() == bytes(count * BLOCK)

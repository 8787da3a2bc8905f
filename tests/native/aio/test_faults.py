"""Every result is inspected: recoverable ones are continued, others become the request's error, with all details."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from infinity.native import _aio

BLOCK = 4096
PIECES = 8
NBYTES = PIECES * BLOCK


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("whole_blocks", [0, 1])
def test_short_by_every_remainder(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, ram: Path, write: bool, whole_blocks: int
) -> None:
    size = 3 * BLOCK
    disk, buffer, io = store(size, "seam", ram), memory(size), engine(block_size=size)
    old, new = scramble(size, 1), scramble(size, 2)
    for remainder in range(1 - whole_blocks, BLOCK):
        disk.path.write_bytes(old if write else new)
        buffer[:] = new if write else old
        faults({"where": "block", "bytes": whole_blocks * BLOCK + remainder})
        request = (io.write if write else io.read)(disk.file, 0, buffer.address, size)
        assert request.wait(10) == size
        assert buffer[:] == new
        assert disk.content() == new


def test_short_again_and_again(store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, ram: Path) -> None:
    faults({"where": "block", "bytes": 1000, "times": -1})
    disk, buffer, io = store(NBYTES, "seam", ram), memory(NBYTES), engine(block_size=NBYTES)
    buffer[:] = values = scramble(NBYTES)
    assert io.write(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    assert disk.content() == values
    buffer[:] = bytes(NBYTES)
    assert io.read(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    assert buffer[:] == values


@pytest.mark.parametrize(("short", "direct_bytes"), [(1000, 1000), (BLOCK, 2 * BLOCK), (BLOCK + 1, BLOCK + 1)])
def test_the_rest_of_a_block_is_buffered(
    tmp_path: Path, memory: Any, engine: Any, faults: Any, short: int, direct_bytes: int
) -> None:
    """O_DIRECT cannot continue inside a block. Two different files show which descriptor was used."""
    (tmp_path / "direct").write_bytes(b"d" * 2 * BLOCK)
    (tmp_path / "buffered").write_bytes(b"b" * 2 * BLOCK)
    faults({"where": "block", "bytes": short})
    with (tmp_path / "direct").open("rb") as direct, (tmp_path / "buffered").open("rb") as buffered:
        buffer, io = memory(2 * BLOCK), engine(block_size=2 * BLOCK)
        file = _aio.File(direct.fileno(), buffered.fileno(), "two files")
        io.read(file, 0, buffer.address, 2 * BLOCK).wait(10)
    assert buffer[:] == (b"d" * direct_bytes).ljust(2 * BLOCK, b"b")


def test_short_direct_transfers(store: Any, memory: Any, scramble: Any, engine: Any, faults: Any) -> None:
    faults({"where": "block", "bytes": BLOCK, "times": -1})
    disk, buffer, io = store(NBYTES, "direct"), memory(NBYTES), engine(block_size=NBYTES)
    buffer[:] = values = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    assert disk.content() == values


@pytest.mark.parametrize(
    "fault",
    [
        {"where": "submit", "error": errno.EINTR, "times": 3},
        {"where": "submit", "error": errno.EAGAIN, "times": 3},
        {"where": "submit", "error": errno.EAGAIN, "after": 1, "times": 3},
        {"where": "submit", "accept": 0, "times": 2},
        {"where": "submit", "accept": 1, "times": -1},
        {"where": "submit", "accept": 3, "times": -1},
        {"where": "reap", "error": errno.EINTR, "times": 5},
        {"where": "event", "error": errno.EINTR, "after": 2, "times": 5},
        {"where": "event", "error": errno.EAGAIN, "after": 2, "times": 5},
    ],
    ids=str,
)
def test_retried(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str, fault: dict[str, Any]
) -> None:
    faults(fault)
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine()
    buffer[:] = values = scramble(NBYTES)
    assert io.write(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    faults(fault)
    buffer[:] = bytes(NBYTES)
    assert io.read(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES
    assert buffer[:] == values


@pytest.mark.parametrize("where", ["submit", "event"])
@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR], ids=["EAGAIN", "EINTR"])
def test_not_retried_for_ever(store: Any, memory: Any, engine: Any, faults: Any, where: str, error: int) -> None:
    faults({"where": where, "error": error, "times": -1})
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine()
    with pytest.raises(OSError) as caught:
        io.read(disk.file, 0, buffer.address, BLOCK).wait(10)
    assert caught.value.errno == error


@pytest.mark.parametrize("at", [0, PIECES // 2, PIECES - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_errors_are_the_requests_own(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str, at: int, write: bool, error: int
) -> None:
    faults({"where": "event", "error": error, "after": at, "only": "write" if write else "read"})
    disk, buffer, io = store(2 * NBYTES, mode), memory(2 * NBYTES), engine(queue_depth=1)
    start = io.write if write else io.read
    bad = start(disk.file, NBYTES, buffer.address, NBYTES)
    with pytest.raises(OSError) as caught:
        bad.wait(10)
    assert caught.value.errno == error
    assert caught.value.filename == str(disk.path)
    kind = "write" if write else "read"
    expected = f"{os.strerror(error)}: {kind} of {BLOCK} bytes at offset {NBYTES + at * BLOCK}, "
    assert caught.value.strerror == expected + f"part of a {kind} of {NBYTES} bytes at offset {NBYTES}"
    assert bad.done()
    assert bad.bytes_done == at * BLOCK  # with one piece in flight, none is begun after a failure
    # The next request knows nothing of it.
    buffer[:NBYTES] = values = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    assert disk.content()[:NBYTES] == values


def test_refused_at_submission(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    faults({"where": "submit", "error": errno.EBADF})
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine()
    with pytest.raises(OSError, match=rf"submission.*{disk.path.name}") as caught:
        io.read(disk.file, 0, buffer.address, NBYTES).wait(10)
    assert caught.value.errno == errno.EBADF
    assert io.read(disk.file, 0, buffer.address, NBYTES).wait(10) == NBYTES


def test_done_only_when_nothing_is_in_flight(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    """The first piece fails at once and the last is in flight, so the buffer is not released yet."""
    faults({"where": "event", "error": errno.EIO}, {"where": "event", "hold": True, "after": PIECES - 2})
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine()
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    with pytest.raises(TimeoutError, match="still under way after"):
        request.wait(0.2)
    assert not request.done()
    assert _aio._release_held() == 1
    with pytest.raises(OSError) as caught:
        request.wait(10)
    assert caught.value.errno == errno.EIO
    assert request.bytes_done == (PIECES - 1) * BLOCK


def test_completions_that_cannot_be_read(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    faults({"where": "reap", "error": errno.EINVAL})
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(queue_depth=4, own=True)
    first, second = (io.read(disk.file, 0, buffer.address, NBYTES) for _ in range(2))
    with pytest.raises(OSError, match="could not be read") as caught:
        first.wait(10)
    assert caught.value.errno == errno.EINVAL
    for request in (second, io.write(disk.file, 0, buffer.address, NBYTES)):
        with pytest.raises(OSError, match="new engine"):
            request.wait(10)
    io.close()


def test_fewer_slots_than_asked_for(store: Any, memory: Any, scramble: Any, engine: Any, faults: Any) -> None:
    for above, depth in ((8, 8), (5, 4), (1, 1)):
        faults({"where": "setup", "error": errno.EAGAIN, "above": above, "times": -1})
        disk, buffer, io = store(NBYTES), memory(NBYTES), engine(queue_depth=32, own=True)
        assert io.queue_depth == depth
        buffer[:] = values = scramble(NBYTES)
        io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
        assert disk.content() == values


@pytest.mark.parametrize(
    ("error", "of_aio", "of_uring"),
    [
        (errno.EAGAIN, "fs.aio-max-nr", "no memory for its rings"),
        (errno.ENOSYS, "does not allow AIO", "no io_uring.*or use libaio"),
        (errno.EPERM, "does not allow AIO", "does not allow io_uring|io_uring_disabled is"),
        (errno.ENOMEM, "io_setup", "no memory for its rings"),
    ],
)
def test_no_queue_at_all(engine: Any, backend: str, faults: Any, error: int, of_aio: str, of_uring: str) -> None:
    faults({"where": "setup", "error": error, "after": 1, "times": -1})  # the second thread's
    with pytest.raises(OSError, match=of_uring if backend == "io_uring" else of_aio) as caught:
        engine(threads=2, own=True)
    assert caught.value.errno == error


def test_all_threads_get_as_much(engine: Any, faults: Any) -> None:
    """All threads get the same depth, although the first could get more."""
    faults({"where": "setup", "error": errno.EAGAIN, "after": 1})
    assert engine(queue_depth=32, threads=2, own=True).queue_depth == 16


def test_beyond_what_the_system_has(store: Any, memory: Any, engine: Any) -> None:
    """More slots than fs.aio-max-nr, on the real kernel: granted in part, or rejected with the reason."""
    try:
        io = engine(queue_depth=65_536, threads=3, own=True)
    except OSError as error:
        assert error.errno == errno.EAGAIN, error
        assert "fs.aio-max-nr" in str(error)
        return
    disk, buffer = store(BLOCK), memory(BLOCK)
    assert io.read(disk.file, 0, buffer.address, BLOCK).wait(10) == BLOCK


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5000, 8192, 3 * BLOCK - 1])
@pytest.mark.parametrize("shift", [0, 3])
def test_file_ends_inside_a_read(store: Any, memory: Any, engine: Any, mode: str, size: int, shift: int) -> None:
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES + BLOCK), engine(block_size=NBYTES)
    disk.truncate(size)
    ended = rf"file ended at or before offset {size}.*now {size} bytes.*{disk.path.name}"
    with pytest.raises(OSError, match=ended) as caught:
        io.read(disk.file, 0, buffer.address + shift, 3 * BLOCK).wait(10)
    assert caught.value.errno == errno.EIO
    assert io.read(disk.file, 0, buffer.address + shift, size).wait(10) == size


def test_a_write_that_takes_nothing(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    faults({"where": "block", "bytes": 0})
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine()
    with pytest.raises(OSError, match="wrote no bytes") as caught:
        io.write(disk.file, 0, buffer.address, BLOCK).wait(10)
    assert caught.value.errno == errno.EIO


def test_descriptor_without_permission(tmp_path: Path, memory: Any, engine: Any) -> None:
    path, buffer, io = tmp_path / "read-only", memory(2 * BLOCK), engine()
    path.write_bytes(bytes(BLOCK))
    with path.open("rb") as opened:
        file = _aio.File(-1, opened.fileno(), str(path))
        with pytest.raises(OSError, match=f"write of {BLOCK} bytes at offset 0.*read-only") as caught:
            io.write(file, 0, buffer.address, BLOCK).wait(10)
        assert caught.value.errno == errno.EBADF
        assert io.read(file, 0, buffer.address, BLOCK).wait(10) == BLOCK
    with pytest.raises(OSError) as caught:
        io.read(file, 0, buffer.address, BLOCK).wait(10)
    assert caught.value.errno == errno.EBADF


def test_memory_that_is_not_there(store: Any, engine: Any, mode: str) -> None:
    disk, io = store(BLOCK, mode), engine()
    with pytest.raises(OSError) as caught:
        io.write(disk.file, 0, BLOCK, BLOCK).wait(10)
    assert caught.value.errno == errno.EFAULT


@pytest.mark.parametrize("shift", [0, 7])
def test_full_disk(
    small_disk: Path, store: Any, memory: Any, scramble: Any, engine: Any, mode: str, shift: int
) -> None:
    """On a full file system, requests that fit complete, the others fail with ENOSPC, and reads continue."""
    nbytes, io = 1 << 20, engine(block_size=1 << 18)
    disk, buffer = store(0, mode, small_disk), memory(nbytes + BLOCK)
    buffer[:] = scramble(nbytes + BLOCK)
    written = 0
    with pytest.raises(OSError) as caught:
        while True:
            written += io.write(disk.file, written, buffer.address + shift, nbytes).wait(10)
            assert written <= 16 << 20
    assert caught.value.errno == errno.ENOSPC
    assert f"of {nbytes} bytes at offset {written}" in str(caught.value)
    assert written >= nbytes
    target = memory(nbytes)
    io.read(disk.file, written - nbytes, target.address, nbytes).wait(10)
    assert target[:] == buffer[shift : shift + nbytes]

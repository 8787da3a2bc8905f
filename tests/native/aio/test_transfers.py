"""Transfers are exact for every alignment, splitting, backend and mode."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.native import _aio

BLOCK = 4096


@pytest.mark.parametrize(("block_size", "queue_depth", "threads"), [(4096, 1, 1), (8192, 3, 2), (1 << 20, 32, 3)])
def test_round_trip(
    store: Any, memory: Any, scramble: Any, engine: Any, mode: str, block_size: int, queue_depth: int, threads: int
) -> None:
    nbytes = (1 << 18) + 12_288
    disk, source, target, io = (
        store(nbytes, mode),
        memory(nbytes),
        memory(nbytes),
        engine(block_size, queue_depth, threads, own=True),
    )
    source[:] = scramble(nbytes)
    assert io.write(disk.file, 0, source.address, nbytes).wait() == nbytes
    assert disk.content() == source[:]
    request = io.read(disk.file, 0, target.address, nbytes)
    assert request.wait() == request.nbytes == request.bytes_done == nbytes
    assert request.done()
    assert target[:] == source[:]
    assert (io.bytes_read, io.bytes_written) == (nbytes, nbytes)
    assert io.bytes_buffered == (0 if mode == "direct" else 2 * nbytes)


# (offset, nbytes) against blocks: whole, inside one block, head only, tail only, both, neither.
SHAPES = [
    (0, 8192),
    (1, 10),
    (4095, 1),
    (4095, 2),
    (100, 8092),
    (0, 10_000),
    (4096, 4097),
    (1, 4095),
    (1, 20_000),
    (5000, 1),
]


@pytest.mark.parametrize(("offset", "nbytes"), SHAPES)
@pytest.mark.parametrize("shift", [0, 1, 512, 4095, "as offset"])
def test_alignments(
    store: Any, memory: Any, scramble: Any, engine: Any, mode: str, offset: int, nbytes: int, shift: int | str
) -> None:
    size = 32_768
    shift = offset % BLOCK if isinstance(shift, str) else shift
    disk, buffer, io = store(size, mode), memory(size + BLOCK), engine(block_size=8192, threads=2)
    model = bytearray(disk.fill(scramble(size)))
    before = scramble(size + BLOCK, 1)

    buffer[:] = before
    io.read(disk.file, offset, buffer.address + shift, nbytes).wait()
    assert buffer[:] == before[:shift] + model[offset : offset + nbytes] + before[shift + nbytes :]

    buffer[:] = before
    io.write(disk.file, offset, buffer.address + shift, nbytes).wait()
    model[offset : offset + nbytes] = before[shift : shift + nbytes]
    assert disk.content() == model
    io.read(disk.file, 0, buffer.address, size).wait()
    assert buffer[:size] == model


def test_length_is_exact(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    disk, source, io = store(0, mode), memory(1_000_001), engine(1 << 18)
    source[:] = scramble(1_000_001)
    io.write(disk.file, 0, source.address, 1_000_001).wait()
    assert disk.content() == source[:]


def test_many_in_flight_on_several_files(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    nbytes, io = 40_960, engine(queue_depth=4, threads=2)
    disks, sources, targets = [], memory(10 * nbytes), memory(10 * nbytes)
    sources[:] = scramble(10 * nbytes)
    for _ in range(3):
        disks.append(store(10 * nbytes, mode))
        disks[-1].fill(scramble(10 * nbytes, len(disks)))
    reads = [io.read(disks[0].file, i * nbytes, targets.address + i * nbytes, nbytes) for i in range(10)]
    writes = [io.write(disks[1 + i % 2].file, i * nbytes, sources.address + i * nbytes, nbytes) for i in range(10)]
    for request in [*writes, *reads[::-1]]:
        request.wait()
    assert targets[:] == disks[0].content()
    for i in range(10):
        here = slice(i * nbytes, (i + 1) * nbytes)
        assert disks[1 + i % 2].content()[here] == sources[here]


def test_edges_and_blocks_see_each_other(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    """Buffered edges and direct blocks of one page, in every order, leave nothing stale."""
    disk, buffer, io = store(16_384), memory(16_384), engine()
    model = bytearray(16_384)
    for turn in range(30):
        offset, nbytes = [(4096, 4096), (4000, 200), (8000, 400), (0, 16_384), (5000, 1000)][turn % 5]
        if turn % 3 == 2:  # fills the page cache
            assert disk.content() == model
        buffer[:] = scramble(16_384, turn)
        io.write(disk.file, offset, buffer.address + offset, nbytes).wait()
        model[offset : offset + nbytes] = buffer[offset : offset + nbytes]
        for start, size in ((0, 16_384), (offset + 1, nbytes - 1)):
            buffer[:] = bytes(16_384)
            io.read(disk.file, start, buffer.address + start, size).wait()
            assert buffer[start : start + size] == model[start : start + size]


def test_only_the_edges_are_buffered(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(65_536), memory(65_536), engine(own=True)
    io.read(disk.file, 100, buffer.address + 100, 30_000).wait()
    assert io.bytes_buffered == (4096 - 100) + (30_100 - 28_672)


def test_nothing_to_do(store: Any, engine: Any, mode: str) -> None:
    disk, io = store(4096, mode), engine()
    for request in (io.read(disk.file, 10_000_000, 0, 0), io.write(disk.file, 5, 1, 0)):
        assert request.done()
        assert request.wait() == 0
    assert disk.content() == bytes(4096)


def test_a_removed_file_works_on(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    disk, buffer, io = store(8192), memory(8192), engine()
    disk.path.unlink()
    buffer[:] = values = scramble(8192)
    io.write(disk.file, 0, buffer.address, 8192).wait()
    buffer[:] = bytes(8192)
    io.read(disk.file, 0, buffer.address, 8192).wait()
    assert buffer[:] == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4096, 4096), "offset is -1"),
        ((0, 4096, -5), "nbytes is -5"),
        ((2**63 - 10, 4096, 11), "nbytes is 11"),
        ((0, 0, 10), "null pointer"),
    ],
)
def test_numbers_without_a_meaning(store: Any, engine: Any, arguments: tuple[int, int, int], message: str) -> None:
    disk, io = store(4096), engine()
    for start in (io.read, io.write):
        with pytest.raises(ValueError, match=message):
            start(disk.file, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 5000}, "multiple of 4096"),
        ({"queue_depth": 0}, "queue_depth is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"backend": "magic"}, "no AIO backend is called 'magic'.*kernel aio"),
    ],
)
def test_options_without_a_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _aio.Engine(**options)


def test_options_are_kept(engine: Any, backend: str) -> None:
    io = engine(8192, 5, 2)
    assert (io.block_size, io.queue_depth, io.threads, io.backend) == (8192, 5, 2, backend)
    assert _aio.Engine().backend == _aio.backends()[0]


def test_file_needs_its_descriptors() -> None:
    with pytest.raises(ValueError, match="buffered_fd"):
        _aio.File(3, -1, "x")
    for alignment in (0, -4096, 100, 6000):
        with pytest.raises(ValueError, match="power of two"):
            _aio.File(-1, 0, "x", alignment)
    file = _aio.File(-1, 0, "caf\udce9", 8192)
    assert (file.path, file.direct, file.alignment) == ("caf\udce9", False, 8192)


def test_alignment_above_the_block_size(tmp_path: Path, memory: Any, scramble: Any, engine: Any) -> None:
    path, buffer, io = tmp_path / "wide", memory(1 << 18), engine(4096, 3, 2)
    path.write_bytes(values := scramble(1 << 18))
    direct, buffered = os.open(path, os.O_RDWR | os.O_DIRECT), os.open(path, os.O_RDWR)
    try:
        file = _aio.File(direct, buffered, str(path), alignment=65_536)
        io.read(file, 1, buffer.address + 1, (1 << 18) - 1).wait()
        assert buffer[1:] == values[1:]
    finally:
        os.close(direct)
        os.close(buffered)


def test_idle_threads_sleep(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    faults({"where": "event", "hold": True})
    disk, buffer, idle, waiting = store(4096), memory(4096), engine(threads=2), engine()
    before = idle.bytes_read  # other tests share the engine
    request = waiting.read(disk.file, 0, buffer.address, 4096)
    start = time.process_time()
    with pytest.raises(TimeoutError):
        request.wait(0.3)
    assert time.process_time() - start < 0.1
    assert idle.bytes_read == before
    assert _aio._release_held() == 1
    request.wait(5)


def test_a_forked_child_leaves_the_engine_alone(tmp_path: Path) -> None:
    script = """
import mmap, ctypes, os, sys
from infinity.native import _aio
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
buffer = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
io, file = _aio.Engine(threads=2), _aio.File(-1, fd, "x")
io.read(file, 0, address, 4096).wait()
child = os.fork()
if child == 0:
    try:
        io.read(file, 0, address, 4096)
    except RuntimeError as error:
        io.close()
        del io
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
io.read(file, 0, address, 4096).wait()
io.close()
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], timeout=30, check=False)
    assert done.returncode == 7

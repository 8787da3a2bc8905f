"""Registered buffers, which io_uring pins once: results are the same, and unregistered memory is not used."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from infinity.native import _aio

BLOCK = 4096
NBYTES = 16 * BLOCK
MAP_FIXED = 0x10


def test_only_io_uring_registers(memory: Any, engine: Any, backend: str) -> None:
    buffer, io = memory(NBYTES), engine(own=True)
    assert io.register(buffer.address, NBYTES) == (backend == "io_uring")
    io.unregister(buffer.address)
    io.unregister(buffer.address)  # nothing there any more: no harm


def test_transfers_inside_beside_and_across(store: Any, memory: Any, scramble: Any, engine: Any, mode: str) -> None:
    disk, buffer, io = store(4 * NBYTES, mode), memory(4 * NBYTES), engine(threads=2, own=True)
    io.register(buffer.address + NBYTES, NBYTES)
    io.register(buffer.address + 2 * NBYTES, BLOCK)
    buffer[:] = values = scramble(4 * NBYTES)
    step = 3 * BLOCK + 100
    for offset in range(0, 4 * NBYTES, step):
        nbytes = min(step, 4 * NBYTES - offset)
        io.write(disk.file, offset, buffer.address + offset, nbytes).wait(10)
    assert disk.content() == values
    buffer[:] = bytes(4 * NBYTES)
    io.read(disk.file, 0, buffer.address, 4 * NBYTES).wait(10)
    assert buffer[:] == values


def test_other_memory_at_the_same_address(store: Any, scramble: Any, engine: Any) -> None:
    """Unregistered memory is not used again, even if new memory has its address."""
    disk, io = store(NBYTES), engine(own=True)
    values = disk.fill(scramble(NBYTES))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    io.register(address, NBYTES)
    io.read(disk.file, 0, address, NBYTES).wait(10)
    io.unregister(address)
    assert libc.mmap(address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags | MAP_FIXED, -1, 0) == address
    assert ctypes.string_at(address, NBYTES) == bytes(NBYTES)
    io.read(disk.file, 0, address, NBYTES).wait(10)
    assert ctypes.string_at(address, NBYTES) == values
    libc.munmap(ctypes.c_void_p(address), NBYTES)


def test_more_buffers_than_the_kernel_has_slots_for(memory: Any, engine: Any, store: Any, backend: str) -> None:
    buffer, io, disk = memory(1100 * BLOCK), engine(own=True), store(BLOCK)
    taken = [io.register(buffer.address + i * BLOCK, BLOCK) for i in range(1100)]
    assert sum(taken) == (1024 if backend == "io_uring" else 0)
    assert io.read(disk.file, 0, buffer.address + 1099 * BLOCK, BLOCK).wait(10) == BLOCK
    io.unregister(buffer.address)
    assert io.register(buffer.address + 1099 * BLOCK, BLOCK) == (backend == "io_uring")


def test_memory_that_is_not_there(engine: Any) -> None:
    io = engine(own=True)
    assert not io.register(BLOCK, BLOCK)


def test_after_close(memory: Any, backend: str) -> None:
    io = _aio.Engine(backend=backend)
    buffer = memory(NBYTES)
    io.register(buffer.address, NBYTES)
    io.close()
    io.unregister(buffer.address)
    assert not io.register(buffer.address, NBYTES)

"""Reads return the written bytes, or raise an error with their location."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from infinity.native import _aio

BLOCK = 4096
SUM = 2 * BLOCK
NBYTES = 16 * BLOCK


def checksums(values: bytes) -> tuple[int, int]:
    memory = ctypes.create_string_buffer(values, len(values))
    address = ctypes.addressof(memory)
    return _aio.checksum(address, len(values)), _aio._portable_checksum(address, len(values))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 700), st.integers(0, 2**32))
def test_every_processor_gives_the_same(nbytes: int, seed: int) -> None:
    by_instruction, by_table = checksums(random.Random(seed).randbytes(nbytes))
    assert by_instruction == by_table


def test_every_bit_counts() -> None:
    values = bytearray(random.Random(0).randbytes(4 * 40 + 3))
    seen = {checksums(bytes(values))[0]}
    for bit in range(8 * len(values)):
        values[bit // 8] ^= 1 << bit % 8
        seen.add(checksums(bytes(values))[0])
        values[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(values) + 1


def test_neighbours_do_not_cancel_out() -> None:
    """A plain CRC of CRCs would miss two flipped bits in neighbouring lanes, one row apart."""
    values = random.Random(0).randbytes(256)
    seen = {checksums(values)[0]}
    for row in range(6):
        for lane in range(1, 4):
            for bit in range(64):
                changed = bytearray(values)
                for at in (32 * row + 8 * lane, 32 * (row + 1) + 8 * (lane - 1)):
                    changed[at + bit // 8] ^= 1 << bit % 8
                seen.add(checksums(bytes(changed))[0])
    assert len(seen) == 6 * 3 * 64 + 1


def test_order_and_length_count() -> None:
    a, b = b"a" * 32, b"b" * 32
    assert len({checksums(v)[0] for v in (a + b, b + a, a, a + bytes(1), bytes(8), bytes(16), bytes(64), b"")}) == 8


@pytest.mark.parametrize("size", [NBYTES, NBYTES - BLOCK, NBYTES - 1, NBYTES - BLOCK - 1, 1, BLOCK + 1])
@pytest.mark.parametrize("shift", [0, 8])
def test_what_was_written_is_right(
    store: Any, memory: Any, scramble: Any, engine: Any, mode: str, size: int, shift: int
) -> None:
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES + BLOCK), engine(SUM, 4, 2)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[shift : shift + size] = values = scramble(size)
    io.write(disk.file, 0, buffer.address + shift, size).wait(10)
    buffer[:] = bytes(NBYTES + BLOCK)
    assert io.read(disk.file, 0, buffer.address + shift, size).wait(10) == size
    assert buffer[shift : shift + size] == values
    part = min(size, 3 * SUM)
    assert io.read(disk.file, 0, buffer.address, part).wait(10) == part


@pytest.mark.parametrize("size", [NBYTES, NBYTES - 1, NBYTES - BLOCK - 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_flipped_bit_is_found(
    store: Any, memory: Any, scramble: Any, engine: Any, mode: str, size: int, threads: int
) -> None:
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine(SUM, 4, threads)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[:size] = values = scramble(size)
    io.write(disk.file, 0, buffer.address, size).wait(10)
    for at in (0, 1, SUM - 1, SUM, size // 2, size - 2, size - 1):
        with disk.path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([values[at] ^ 4]), at)
            os.fsync(file.fileno())
            with pytest.raises(
                OSError, match=rf"of {min(SUM, size - at // SUM * SUM)} bytes at offset {at // SUM * SUM}"
            ) as caught:
                io.read(disk.file, 0, buffer.address, size).wait(10)
            assert caught.value.errno == errno.EBADMSG
            assert caught.value.filename == str(disk.path)
            os.pwrite(file.fileno(), bytes([values[at]]), at)
            os.fsync(file.fileno())
    assert io.read(disk.file, 0, buffer.address, size).wait(10) == size


def test_a_lost_write_is_found(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    """A drive that reports success and keeps the old bytes is detected."""
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    for turn in range(2):
        before = disk.content()
        buffer[:] = scramble(NBYTES, turn)
        io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    disk.fill(before)
    with pytest.raises(OSError, match="not those that were written there"):
        io.read(disk.file, SUM, buffer.address, SUM).wait(10)


def test_bytes_changed_on_the_way(store: Any, memory: Any, scramble: Any, engine: Any, faults: Any) -> None:
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[:] = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    faults({"where": "event", "flip": True, "only": "read", "after": 2})
    # Requests complete in any order: the third to complete need not be the third block.
    with pytest.raises(
        OSError, match=rf"read of {SUM} bytes at offset \d+, part of a read of {NBYTES} bytes"
    ) as caught:
        io.read(disk.file, 0, buffer.address, NBYTES).wait(10)
    assert caught.value.errno == errno.EBADMSG


def test_what_was_never_written_is_not_known(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    values = disk.fill(scramble(NBYTES))
    io.read(disk.file, 0, buffer.address, NBYTES).wait(10)
    assert buffer[:] == values


def test_striped(store: Any, memory: Any, scramble: Any, engine: Any) -> None:
    disks = [store(NBYTES), store(NBYTES)]
    whole = _aio.File.striped([disk.file for disk in disks], SUM)
    whole.keep_checksums(2 * NBYTES, SUM)
    buffer, io = memory(2 * NBYTES), engine(SUM, threads=2)
    buffer[:] = scramble(2 * NBYTES)
    io.write(whole, 0, buffer.address, 2 * NBYTES).wait(10)
    assert io.read(whole, SUM, buffer.address, 5 * SUM).wait(10) == 5 * SUM
    content = bytearray(disks[1].content())
    content[SUM] ^= 1
    disks[1].fill(bytes(content))
    with pytest.raises(OSError, match=f"at offset {SUM}, part of") as caught:
        io.read(whole, 0, buffer.address, 2 * NBYTES).wait(10)
    assert caught.value.filename == str(disks[1].path)


def test_requests_start_with_a_block(store: Any, memory: Any, engine: Any) -> None:
    disk, buffer, io = store(NBYTES), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    with pytest.raises(ValueError, match=f"offset is {BLOCK}; .* multiple of {SUM}"):
        io.read(disk.file, BLOCK, buffer.address, BLOCK)
    with pytest.raises(ValueError, match=f"block_size is {BLOCK}; .* multiple of {SUM}"):
        engine(BLOCK).read(disk.file, 0, buffer.address, SUM)


@pytest.mark.parametrize(("nbytes", "block"), [(NBYTES, 0), (NBYTES, 1000), (-1, BLOCK)])
def test_numbers_without_a_meaning(store: Any, nbytes: int, block: int) -> None:
    with pytest.raises(ValueError):
        store(NBYTES).file.keep_checksums(nbytes, block)

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


def checksums(values: bytes) -> tuple[int, int, int]:
    """Return the checksum by the fastest implementation, by the CRC instruction, and by the table."""
    memory = ctypes.create_string_buffer(values, len(values))
    address = ctypes.addressof(memory)
    by_instruction = _aio._instruction_checksum(address, len(values))
    return _aio.checksum(address, len(values)), by_instruction, _aio._portable_checksum(address, len(values))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 700) | st.integers(0, 40_000), st.integers(0, 2**32))
def test_every_implementation_gives_the_same(nbytes: int, seed: int) -> None:
    fastest, by_instruction, by_table = checksums(random.Random(seed).randbytes(nbytes))
    assert fastest == by_instruction == by_table


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_it_is_crc32c(values: bytes, expected: int) -> None:
    """Values of RFC 3720, B.4, and of the catalogue of parametrised CRC algorithms."""
    assert checksums(values) == (expected,) * 3


def test_every_bit_counts() -> None:
    values = bytearray(random.Random(0).randbytes(4 * 40 + 3))
    seen = {checksums(bytes(values))[0]}
    for bit in range(8 * len(values)):
        values[bit // 8] ^= 1 << bit % 8
        seen.add(checksums(bytes(values))[0])
        values[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(values) + 1


def test_neighbours_do_not_cancel_out() -> None:
    """Two flipped bits in neighbouring words are found, which sums of several lanes may miss."""
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


def corrupt(disk: Any, at: int) -> None:
    """Change one bit of a file, as a drive might."""
    with disk.path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
        os.fsync(file.fileno())


FLIPPED = {"where": "event", "flip": True, "only": "read"}
"""A read changes the first byte of a piece."""


def test_bytes_changed_on_the_way_are_read_again(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str
) -> None:
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[:] = values = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    for count in (1, 2):
        faults({**FLIPPED, "after": 2})
        buffer[:] = bytes(NBYTES)
        request = io.read(disk.file, 0, buffer.address, NBYTES)
        assert request.wait(10) == NBYTES
        assert buffer[:] == values
        # Requests complete in any order: the third to complete need not be the third block.
        [(offset, nbytes, path, number)] = request.take_repaired()
        assert offset % SUM == 0 and (nbytes, path, number) == (SUM, str(disk.path), count)
        assert request.take_repaired() == [] and not request.mismatch
    assert disk.file.repaired == 2


@pytest.mark.parametrize("size", [NBYTES, NBYTES - 1, NBYTES - BLOCK - 1, 1])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shift", [0, 8])
def test_every_block_of_a_request_can_be_repaired(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str, size: int, threads: int, shift: int
) -> None:
    """Pieces of two blocks, whole requests that take the page cache, and a last block in two pieces are repaired."""
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES + BLOCK), engine(2 * SUM, 4, threads)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[shift : shift + size] = values = scramble(size)
    io.write(disk.file, 0, buffer.address + shift, size).wait(10)
    faults({**FLIPPED, "times": -1})
    request = io.read(disk.file, 0, buffer.address + shift, size)
    request.wait(10)
    assert buffer[shift : shift + size] == values
    repaired = request.take_repaired()
    assert {offset for offset, *_ in repaired} >= set(range(0, size, 2 * SUM))
    assert all(offset % SUM == 0 and nbytes == min(SUM, size - offset) for offset, nbytes, *_ in repaired)


def test_a_repair_takes_short_transfers(store: Any, memory: Any, scramble: Any, engine: Any, faults: Any) -> None:
    disk, buffer, io = store(NBYTES, "seam"), memory(NBYTES), engine(2 * SUM, 4, 2)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[:] = values = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    faults({"where": "block", "bytes": 3000, "times": 5}, {**FLIPPED, "times": 3})
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    request.wait(10)
    assert buffer[:] == values and request.take_repaired()


def test_a_bad_block_is_told_from_a_bad_cable(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any, mode: str
) -> None:
    """The error says whether the second read returned the same wrong bytes, other ones, or none."""
    disk, buffer, io = store(NBYTES, mode), memory(NBYTES), engine(SUM)
    disk.file.keep_checksums(NBYTES, SUM)
    buffer[:] = scramble(NBYTES)
    io.write(disk.file, 0, buffer.address, NBYTES).wait(10)
    corrupt(disk, SUM + 100)
    request = io.read(disk.file, 0, buffer.address, NBYTES)
    with pytest.raises(OSError, match=rf"{SUM} bytes at offset {SUM}.*; a second read returned the same bytes: a b"):
        request.wait(10)
    assert request.mismatch and request.take_repaired() == []
    faults({**FLIPPED, "times": -1})
    request = io.read(disk.file, SUM, buffer.address, SUM)
    with pytest.raises(OSError, match=rf"read of {SUM} bytes at offset {SUM}.*; a second read returned other bytes, w"):
        request.wait(10)
    assert request.mismatch
    faults({"where": "event", "hold": True})
    request = io.read(disk.file, SUM, buffer.address, SUM)
    with pytest.raises(TimeoutError):
        request.wait(0.2)
    disk.truncate(BLOCK)
    _aio._release_held()
    with pytest.raises(OSError, match="a second read found that the file ends before them"):
        request.wait(10)
    assert request.mismatch and disk.file.repaired == 0


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
    with pytest.raises(OSError, match=f"at offset {SUM}, part of .*a second read returned the same bytes") as caught:
        io.read(whole, 0, buffer.address, 2 * NBYTES).wait(10)
    assert caught.value.filename == str(disks[1].path)


def test_a_striped_file_is_repaired_where_its_block_lies(
    store: Any, memory: Any, scramble: Any, engine: Any, faults: Any
) -> None:
    disks = [store(NBYTES), store(NBYTES), store(NBYTES)]
    whole = _aio.File.striped([disk.file for disk in disks], 2 * SUM)
    whole.keep_checksums(3 * NBYTES, SUM)
    buffer, io = memory(3 * NBYTES), engine(SUM, threads=3)
    buffer[:] = values = scramble(3 * NBYTES)
    io.write(whole, 0, buffer.address, 3 * NBYTES).wait(10)
    faults({**FLIPPED, "times": -1})
    request = io.read(whole, 0, buffer.address, 3 * NBYTES)
    request.wait(10)
    assert buffer[:] == values
    places = {(path, offset) for offset, _, path, _ in request.take_repaired()}
    assert places == {(str(disk.path), offset) for disk in disks for offset in range(0, NBYTES, SUM)}
    assert whole.repaired == 3 * NBYTES // SUM


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

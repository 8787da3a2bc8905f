"""Numbers that cannot be those of memory or of a file are refused before they become addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infinity.native import _aio

BLOCK = 4096
NUMBERS = [-(1 << 63), -1, 0, 1, 511, BLOCK - 1, (1 << 31) - 1, 1 << 31, 1 << 48, (1 << 62) + 1, (1 << 63) - 1, 1 << 63]


@pytest.mark.parametrize("function", [_aio.checksum, _aio._portable_checksum])
@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(BLOCK, -1), (BLOCK, -(1 << 63)), (0, 1), (0, 1 << 40), ((1 << 64) - 8, 16), ((1 << 63) - 1, 2), (1 << 63, 0)],
)
def test_a_checksum_of_no_memory_is_refused(function: Callable[[int, int], int], address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"nbytes is|address is"):
        function(address, nbytes)


def test_a_checksum_of_nothing_reads_nothing() -> None:
    assert _aio.checksum(0, 0) == _aio.checksum(BLOCK, 0)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-1, 1), (0, -1), (-(1 << 63), 1), ((1 << 63) - 1, 1), (1, (1 << 63) - 1), ((1 << 62) + 1, 1 << 62)],
)
def test_a_transfer_beyond_the_largest_file_is_refused(
    store: Any, memory: Any, engine: Any, write: bool, offset: int, nbytes: int
) -> None:
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine()
    with pytest.raises(ValueError, match=r"it must be between|address space"):
        (io.write if write else io.read)(disk.file, offset, buffer.address, nbytes)


@pytest.mark.parametrize("address", [0, (1 << 64) - 8, 1 << 63])
def test_a_transfer_to_no_memory_is_refused(store: Any, engine: Any, address: int) -> None:
    disk, io = store(BLOCK), engine()
    for call in (io.read, io.write):
        with pytest.raises(ValueError, match="address"):
            call(disk.file, 0, address, BLOCK)
    with pytest.raises(ValueError, match="address"):
        io.register(address, BLOCK)


@pytest.mark.parametrize("offset", [BLOCK, BLOCK + 1, 1 << 40, (1 << 63) - 2 * BLOCK])
def test_a_read_beyond_the_end_is_an_error(store: Any, memory: Any, engine: Any, offset: int) -> None:
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine()
    with pytest.raises(OSError):
        io.read(disk.file, offset, buffer.address, BLOCK).wait(10)


@pytest.mark.parametrize("by", [1, 7, 8, 511])
def test_a_buffer_of_any_alignment_is_filled(store: Any, memory: Any, engine: Any, by: int) -> None:
    disk, buffer, io = store(BLOCK), memory(2 * BLOCK), engine()
    disk.fill(b"7" * BLOCK)
    io.read(disk.file, 0, buffer.address + by, BLOCK - by).wait(10)
    assert buffer[by : by + BLOCK - by] == b"7" * (BLOCK - by) and buffer[BLOCK : BLOCK + 1] == b"\0"


@pytest.mark.parametrize("number", NUMBERS)
def test_files_and_stripes_of_any_number_are_made_or_refused(store: Any, number: int) -> None:
    first, second = store(BLOCK), store(BLOCK)
    for call in (
        lambda: _aio.File(-1, first._fds[0], "file", number),
        lambda: _aio.File.striped([first.file, second.file], number),
        lambda: _aio.File(-1, first._fds[0], "file").keep_checksums(number if number != 1 << 48 else -1, BLOCK),
    ):
        try:
            call()
        except (ValueError, TypeError):  # pybind11 raises TypeError beyond 64 bits
            continue
        assert 0 <= number <= 1 << 31


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("option", ["block_size", "queue_depth", "threads"])
def test_engines_of_any_number_are_made_or_refused(option: str, number: int) -> None:
    try:
        _aio.Engine(**{"block_size": BLOCK, "queue_depth": 1, "threads": 1, option: number}).close()
    except (ValueError, TypeError):
        return
    assert 0 < number <= 1 << 30


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e300, -1.0, 0.0])
def test_a_request_is_waited_for_with_any_timeout(store: Any, memory: Any, engine: Any, timeout: float) -> None:
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine()
    request = io.read(disk.file, 0, buffer.address, BLOCK)
    request.wait(10)
    assert request.wait(timeout) == BLOCK

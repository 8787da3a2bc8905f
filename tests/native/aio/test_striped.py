"""Several files read and written as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from infinity.native import _aio

BLOCK = 4096
CHUNK = 2 * BLOCK
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def dealt(whole: bytes, members: int, order: Sequence[int]) -> list[bytes]:
    """Return the bytes of each member of a striped file."""
    chunks: list[list[bytes]] = [[] for _ in range(members)]
    for at in range(0, len(whole), CHUNK):
        chunks[order[at // CHUNK % len(order)]].append(whole[at : at + CHUNK])
    return [b"".join(each) for each in chunks]


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@settings(SETTINGS, max_examples=12)
@given(data=st.data())
def test_against_a_model(
    data: st.DataObject, store: Any, memory: Any, scramble: Any, engine: Any, mode: str, members: int, threads: int
) -> None:
    """Members in turn, or in any order with repetitions, in which some may be missing."""
    drawn = data.draw(st.lists(st.integers(0, members - 1), max_size=7), label="order")
    order = drawn or list(range(members))
    size = members * 4 * CHUNK
    held = [len(part) for part in dealt(bytes(size), members, order)]
    disks = [store(max(BLOCK, nbytes), mode) for nbytes in held]
    whole = _aio.File.striped([disk.file for disk in disks], CHUNK, drawn)
    io, buffer = engine(BLOCK, 4, threads), memory(size + BLOCK)
    model = bytearray(size)
    for turn in range(data.draw(st.integers(1, 4))):
        aligned = data.draw(st.booleans())
        unit = BLOCK if aligned else 1
        begin = data.draw(st.integers(0, size // unit)) * unit
        end = data.draw(st.integers(begin // unit, size // unit)) * unit
        shift = 0 if aligned else data.draw(st.sampled_from([0, begin % BLOCK, 8]))
        buffer[shift : shift + end - begin] = values = scramble(end - begin, turn)
        model[begin:end] = values
        assert io.write(whole, begin, buffer.address + shift, end - begin).wait(10) == end - begin
    contents = [disk.content()[:nbytes] for disk, nbytes in zip(disks, held, strict=True)]
    assert contents == dealt(bytes(model), members, order)
    buffer[:size] = bytes(size)
    assert io.read(whole, 0, buffer.address, size).wait(10) == size
    assert buffer[:size] == model
    for disk in disks:
        disk.close()


def test_an_error_names_the_member(store: Any, memory: Any, engine: Any) -> None:
    first, second = store(4 * CHUNK), store(4 * CHUNK)
    whole = _aio.File.striped([first.file, second.file], CHUNK)
    second.truncate(CHUNK)
    buffer, io = memory(8 * CHUNK), engine(block_size=CHUNK)
    with pytest.raises(OSError, match=rf"read of {CHUNK} bytes at offset {CHUNK}, part of a read of") as caught:
        io.read(whole, 0, buffer.address, 4 * CHUNK).wait(10)
    assert caught.value.filename == str(second.path)
    assert f"{first.path} + {second.path}" in str(caught.value)
    assert io.read(whole, 0, buffer.address, 3 * CHUNK).wait(10) == 3 * CHUNK


def test_members_have_threads_of_their_own(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    """A stalled drive does not stall the other."""
    faults({"where": "event", "hold": True, "only": "read", "times": 4})
    first, second = store(8 * CHUNK), store(8 * CHUNK)
    whole = _aio.File.striped([first.file, second.file], CHUNK)
    buffer, io = memory(16 * CHUNK), engine(block_size=CHUNK, queue_depth=4, threads=2, own=True)
    slow = [io.read(whole, 2 * i * CHUNK, buffer.address, CHUNK) for i in range(8)]  # all in the first
    assert io.write(whole, CHUNK, buffer.address + 8 * CHUNK, CHUNK).wait(10) == CHUNK
    assert not slow[0].done()
    _aio._release_held()
    for one in slow:
        one.wait(10)


@pytest.mark.parametrize(
    ("files", "chunk", "message"),
    [(0, CHUNK, "at least one"), (2, 0, "positive multiple of 4096"), (2, 5000, "positive multiple of 4096")],
)
def test_what_makes_no_sense(store: Any, files: int, chunk: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _aio.File.striped([store(BLOCK).file for _ in range(files)], chunk)


@pytest.mark.parametrize("order", [[0, 2], [-1, 0], [0] * 4097], ids=["beyond", "negative", "too long"])
def test_an_order_names_the_files(store: Any, order: list[int]) -> None:
    with pytest.raises(ValueError, match="order"):
        _aio.File.striped([store(BLOCK).file, store(BLOCK).file], CHUNK, order)


def test_not_of_striped_files(store: Any) -> None:
    pair = _aio.File.striped([store(BLOCK).file, store(BLOCK).file], CHUNK)
    with pytest.raises(ValueError, match="plain files"):
        _aio.File.striped([pair, pair], CHUNK)


def test_direct_only_if_all_are(store: Any) -> None:
    direct, buffered = store(BLOCK), store(BLOCK, "buffered")
    assert _aio.File.striped([direct.file, direct.file], CHUNK).direct
    assert not _aio.File.striped([direct.file, buffered.file], CHUNK).direct

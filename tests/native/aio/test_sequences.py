"""Random sequences of requests against a model in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

SIZE = 65_536
ROOM = 24_576  # the largest request, with space for its misalignment


class Op(NamedTuple):
    write: bool
    offset: int
    nbytes: int
    shift: int  # of the address


def edges(limit: int) -> st.SearchStrategy[int]:
    """Return numbers up to `limit`, most of them at or next to a multiple of the block size."""
    near = st.builds(lambda k, d: min(limit, max(0, 4096 * k + d)), st.integers(0, limit // 4096), st.integers(-2, 2))
    return st.one_of(near, st.builds(lambda k: 4096 * k, st.integers(0, limit // 4096)), st.integers(0, limit))


OPS = st.lists(
    st.builds(
        lambda write, offset, nbytes, congruent, shift: Op(
            write, offset, min(nbytes, SIZE - offset), offset % 4096 if congruent else shift % 4096
        ),
        st.booleans(),
        edges(SIZE - 1),
        edges(ROOM - 4096),
        st.booleans(),
        edges(4096),
    ),
    min_size=1,
    max_size=16,
)


def play(ops: list[Op], order: random.Random, io: Any, disk: Any, arena: Any, scramble: Any) -> None:
    """Starts every request at once, unless it overlaps one under way that writes, or that it would write over: that one
    is waited for first. Waits for the others in a random order: for some soon, for most when all have been started."""
    model = bytearray(disk.content())
    under_way: list[tuple[Op, Any, int, bytes]] = []

    def finish(op: Op, request: Any, at: int, expected: bytes) -> None:
        assert request.wait(10) == op.nbytes
        assert arena[at : at + op.nbytes] == expected

    for turn, op in enumerate(ops):
        at = turn * ROOM + op.shift
        for entry in list(under_way):
            other = entry[0]
            apart = op.offset + op.nbytes <= other.offset or other.offset + other.nbytes <= op.offset
            if not apart and (op.write or other.write):
                finish(*entry)
                under_way.remove(entry)
        if op.write:
            arena[at : at + op.nbytes] = values = scramble(op.nbytes, turn)
            model[op.offset : op.offset + op.nbytes] = values
        start = io.write if op.write else io.read
        request = start(disk.file, op.offset, arena.address + at, op.nbytes)
        under_way.append((op, request, at, bytes(model[op.offset : op.offset + op.nbytes])))
        if order.random() < 0.2:
            finish(*under_way.pop(order.randrange(len(under_way))))
    order.shuffle(under_way)
    for entry in under_way:
        finish(*entry)
    assert disk.content() == model


# The profile's number of examples (100 by default), scaled to the test's time.
EXAMPLES = settings.default.max_examples
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("block_size", "threads"), [(4096, 1), (8192, 2)])
@settings(SETTINGS, max_examples=max(1, EXAMPLES // 5))
@given(ops=OPS, seed=SEEDS)
def test_on_disk(
    ops: list[Op],
    seed: int,
    store: Any,
    memory: Any,
    scramble: Any,
    engine: Any,
    block_size: int,
    threads: int,
    mode: str,
) -> None:
    disk = store(SIZE, mode)
    disk.fill(scramble(SIZE))
    play(ops, random.Random(seed), engine(block_size, 3, threads), disk, memory(len(ops) * ROOM), scramble)
    disk.close()


@settings(SETTINGS, max_examples=5 * EXAMPLES)
@given(ops=OPS, seed=SEEDS, short=st.integers(1, 8191), often=st.integers(0, 3))
def test_with_faults(
    ops: list[Op],
    seed: int,
    short: int,
    often: int,
    ram: Path,
    store: Any,
    memory: Any,
    scramble: Any,
    engine: Any,
    faults: Any,
) -> None:
    """The same with short transfers, interruptions and rejections: 3,000 sequences in all, 10,200 in a campaign."""
    disk = store(SIZE, "seam", ram)
    disk.fill(scramble(SIZE))
    faults(
        {"where": "block", "bytes": short, "after": often, "times": 3},
        {"where": "block", "bytes": 4096, "after": often, "times": 3},
        {"where": "submit", "accept": 1, "times": 4},
        {"where": "submit", "error": 4, "after": 5, "times": 2},
        {"where": "reap", "error": 4, "times": 2},
        {"where": "event", "error": 4, "after": often, "times": 2},
    )
    play(ops, random.Random(seed), engine(8192, 4, 2), disk, memory(len(ops) * ROOM), scramble)
    disk.close()
    disk.path.unlink()

"""Reads ahead into host buffers: compared with a plain rule, and the extents that are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hypothesis import given, strategies as st

from infinity.plan.placement import Extent
from infinity.plan.pools import STAGING_BYTES
from infinity.tier_kind import TierKind
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.tiers.read_ahead import ReadAhead
from infinity.tiers.transfer import Transfer

SIZE = 4096
EXTENTS = [Extent(TierKind.NVME, index * SIZE, SIZE, f"parameters of unit {index}") for index in range(8)]
ORDER = st.lists(st.sampled_from(EXTENTS), unique_by=lambda extent: extent.offset, max_size=8)


class Read:
    """A read that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = False

    def wait(self) -> None:
        self.ended = True

    def done(self) -> bool:
        return self.ended


class Plain(ReadAhead):
    """Takes all extents before it decides."""

    def want(self, extents: object) -> None:
        assert isinstance(extents, Sequence)
        wanted = {extent.offset for extent in extents}
        for offset in [offset for offset in self._pieces if offset not in wanted]:
            self._dropped += self._pieces.pop(offset)
        self._release_ended()
        for extent in extents:
            if not self._extend(extent):
                return


class Case:
    """One of the two, and the reads that it has started."""

    def __init__(self, kind: type[ReadAhead], buffers: int) -> None:
        self.started: list[tuple[str, int]] = []
        self.reads: list[Read] = []
        self.ahead = kind(Pool(host_tensor, {SIZE: buffers}, name="reads ahead"), self.read)

    def read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        self.started.append((extent.name, offset))
        self.reads.append(Read())
        return self.reads[-1]

    def held(self) -> list[tuple[int, int]]:
        return [(offset, len(pieces)) for offset, pieces in self.ahead._pieces.items()]


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["want", "take", "forget", "end"]), ORDER), max_size=12))
def test_reads_are_those_of_the_plain_rule(buffers: int, calls: list[tuple[str, list[Extent]]]) -> None:
    case, plain = Case(ReadAhead, buffers), Case(Plain, buffers)
    for call, extents in calls:
        for each in (case, plain):
            if call == "want":
                each.ahead.want(extents)
            elif call == "end":
                for number, _ in enumerate(extents):
                    for read in each.reads[number : number + 1]:
                        read.ended = True
            elif call == "take":
                for extent in extents[:1]:
                    for piece in each.ahead.take(extent):
                        piece.abandon()
            else:
                for extent in extents[:1]:
                    each.ahead.forget(extent)
        assert case.started == plain.started and case.held() == plain.held()
        assert len(case.ahead._dropped) == len(plain.ahead._dropped)
    for each in (case, plain):
        each.ahead.close()


def test_no_more_extents_are_looked_at_than_the_buffers_hold() -> None:
    case, seen = Case(ReadAhead, 2), list[Extent]()

    def counted(extents: Sequence[Extent]) -> Iterator[Extent]:
        for extent in extents:
            seen.append(extent)
            yield extent

    assert SIZE <= STAGING_BYTES  # each extent is one piece
    for start in range(4):
        seen.clear()
        case.ahead.want(counted(EXTENTS[start:]))
        assert seen == EXTENTS[start : start + 3]
        for piece in case.ahead.take(EXTENTS[start]):
            piece.abandon()
    case.ahead.close()

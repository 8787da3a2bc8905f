"""The nvme tier of a durable run: a seal completes extents that were written in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.native import _aio
from infinity.plan.io import plan_durable
from infinity.plan.placement import Extent, Placement, State
from infinity.tier_kind import TierKind
from infinity.tiers import durable
from infinity.tiers.device import CpuDevice
from infinity.tiers.durable import DurableTier
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine as open_io
from infinity.tiers.memory import host_tensor
from infinity.tiers.slots import Slots
from infinity.tiers.transfer import Transfer
from support.late_disk import LateTransfer

BLOCK = 4096
STATES = Extent(TierKind.NVME, 0, 5 * BLOCK, "states")
PLAN = plan_durable("run", Placement({(0, State.OPTIM): STATES}, {"nvme": STATES.nbytes}, {}, {}), STATES.nbytes)


class LateTier(DurableTier):
    """A durable tier with the delays of `support.late_disk`."""

    def _read_at(self, place: int, memory: torch.Tensor, extent: Extent) -> Transfer:
        then = host_tensor(memory.numel())
        super()._read_at(place, then, extent).wait()
        memory.fill_(0xFF)
        return LateTransfer(lambda: memory.copy_(then))

    def _write_at(self, place: int, memory: torch.Tensor, extent: Extent, file: _aio.File | None = None) -> Transfer:
        return LateTransfer(lambda: super(LateTier, self)._write_at(place, memory, extent, file).wait())


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DurableTier]:
    nbytes = STATES.nbytes + PLAN.nbytes
    file = open_swap_files([tmp_path], nbytes, name="x")
    engine = open_io("auto", block_size=BLOCK, queue_depth=4, threads=1)
    made = LateTier(Slots(PLAN.extents, None), file, nbytes, engine, CpuDevice())
    yield made
    made.close()


def write(tier: DurableTier, block: int, count: int, value: int) -> None:
    memory = host_tensor(count * BLOCK)
    memory.fill_(value)
    tier.write(STATES, memory, block * BLOCK).wait()


def blocks(tier: DurableTier) -> list[int]:
    memory = host_tensor(STATES.nbytes)
    tier.read(STATES, memory).wait()
    assert all(len(torch.unique(block)) == 1 for block in memory.split(BLOCK))
    return memory[::BLOCK].tolist()


def test_a_seal_copies_what_was_not_written(tier: DurableTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece in parts, which pass through one buffer."""
    monkeypatch.setattr(durable, "_PIECE", BLOCK)
    for block in range(5):
        write(tier, block, 1, block + 1)
    tier.adopt(tier.seal(), [STATES])
    write(tier, 1, 1, 9)
    tier.adopt(tier.seal(), [STATES])
    assert blocks(tier) == [1, 9, 3, 4, 5]

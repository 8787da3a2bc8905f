"""Records of optimizer states: every tier and tile size holds what was written, and those in memory need no buffers."""

from __future__ import annotations

import pytest
import torch

from infinity.plan.formats import MasterFormat, state_format
from infinity.plan.placement import WHOLE_SHARD, Extent, tiles
from infinity.rules import MomentFormat
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Transfer
from infinity.units import records
from infinity.units.records import Records
from support.late_disk import LateTransfer

NUMEL = 4 * 4096 + 2048
OFFSET = 64 << 10


class Late(SlabTier):
    """Memory whose transfers are carried out when they are waited for."""

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        return LateTransfer(lambda: super(Late, self).read(extent, destination, offset).wait())

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        return LateTransfer(lambda: super(Late, self).write(extent, source, offset).wait())


class OnDisk(Late):
    """Stands for a tier whose records are transferred whole."""

    in_memory = False


def records_of(
    tile_size: int, kind: type[SlabTier] = SlabTier, moments: MomentFormat = "8bit", master: MasterFormat = "remainder"
) -> Records:
    """Return records in memory that was used before."""
    states = state_format(torch.bfloat16, master, "adamw", moments)
    cut = tiles(NUMEL, tile_size, states)
    nbytes = cut[-1].offset + cut[-1].nbytes
    tier = kind(TierKind.HOST, OFFSET + nbytes, CpuDevice())
    extent = Extent(TierKind.HOST, OFFSET, nbytes, "states")
    tier.memory(extent).fill_(0xA5)
    return Records(tier, extent, states, cut)


def values_of(one: Records) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {kind.name: torch.randint(0, 100, (kind.length(NUMEL),)).to(kind.dtype) for kind in one.states.states}


def read(one: Records) -> dict[str, torch.Tensor]:
    found = {kind.name: torch.full((kind.length(NUMEL),), 7).to(kind.dtype) for kind in one.states.states}
    one.read(found)
    return found


CASES = [(size, kind) for size in (4096, 8192, 1 << 20, WHOLE_SHARD) for kind in (Late, OnDisk)]


@pytest.mark.parametrize(("tile_size", "kind"), CASES)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_states_are_read_as_written(tile_size: int, kind: type[SlabTier], moments: MomentFormat) -> None:
    one = records_of(tile_size, kind, moments)
    values = values_of(one)
    one.write(values)
    assert all(torch.equal(value, values[name]) for name, value in read(one).items())


@pytest.mark.parametrize(("tile_size", "kind"), CASES)
def test_states_left_out_become_zero(tile_size: int, kind: type[SlabTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_ZEROS", 4096)
    one = records_of(tile_size, kind)
    values = values_of(one)
    one.write({"remainder": values["remainder"]})
    found = read(one)
    assert torch.equal(found.pop("remainder"), values["remainder"])
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize(("tile_size", "kind"), CASES)
@pytest.mark.parametrize("master", ["remainder", "fp32"])
def test_only_masters_of_changed_elements_are_set(tile_size: int, kind: type[SlabTier], master: MasterFormat) -> None:
    one = records_of(tile_size, kind, "fp32", master)
    before = values_of(one)
    one.write(before)
    changed = torch.zeros(NUMEL, dtype=torch.bool)
    changed[[0, 5000, NUMEL - 1]] = True
    one.sync_masters(changed, torch.full((NUMEL,), 300, dtype=torch.bfloat16))
    name = "remainder" if master == "remainder" else "master"
    expected = before[name].clone()
    expected[changed] = 0 if master == "remainder" else 300
    after = read(one)
    assert torch.equal(after.pop(name), expected)
    assert all(torch.equal(value, before[other]) for other, value in after.items())


def test_records_in_memory_take_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = records_of(WHOLE_SHARD)
    values = values_of(one)

    def refuse(nbytes: int) -> torch.Tensor:
        raise AssertionError(f"a buffer of {nbytes} bytes")

    monkeypatch.setattr(records, "host_tensor", refuse)
    one.write(values)
    assert all(torch.equal(value, values[name]) for name, value in read(one).items())

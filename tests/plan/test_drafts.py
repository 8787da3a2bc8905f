"""The units whose updates may be drafts, and the second slots that this takes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import infinity
from infinity.comm.communicator import Communicator
from infinity.engine import budget as resolved
from infinity.engine.wiring import plan_model
from infinity.plan.placement import State, aligned
from infinity.plan.plan import Plan
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.late_device import LateDevice
from support.models import Stack, seeded

UNITS = 8


def planned(folder: Path, param: str = "nvme", optim: str = "nvme", *, late: bool = False, **options: Any) -> Plan:
    model, seam = seeded(lambda: Stack(32, UNITS - 2)), LateDevice() if late else CpuDevice()
    config = engine_config(param, optim, folder=folder, **{"clip": 1.0, **options})
    return plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan


@pytest.mark.parametrize(
    ("options", "drafted"),
    [
        ({}, True),
        ({"clip": 0.0}, False),
        ({"clip": 0.0, "fp16": {"loss_scale": 8}}, True),
        ({"speculate": False}, False),
        ({"update": "next_forward"}, False),
        ({"update": "after_backward"}, False),
        ({"durable": True}, True),
        ({"optim": "cpu"}, False),  # the host computes, so an update in memory takes its time anyway
        ({"optim": "none"}, False),
        ({"param": "cpu"}, False),  # without a limit, no second slot in host memory
        ({"late": True}, True),
        ({"late": True, "param": "cpu", "optim": "cpu"}, False),
        ({"late": True, "param": "cpu", "optim": "cpu", "memory": {"host": "64MiB"}}, True),
        ({"late": True, "param": "cpu", "optim": "cpu", "memory": {"host": "64MiB"}, "durable": True}, True),
        ({"late": True, "param": "none", "optim": "cpu", "stage": 2, "memory": {"host": "64MiB"}}, True),
        ({"late": True, "param": "none", "optim": "none"}, False),
        ({"late": True, "param": "none", "optim": "none", "memory": {"host": "64MiB"}}, False),
    ],
    ids=str,
)
def test_which_configs_draft(options: dict[str, Any], drafted: bool, tmp_path: Path) -> None:
    """All units with slots on nvme, three quarters with slots in host memory, spread over the model."""
    found = planned(tmp_path, **options)
    in_memory = options.get("optim") == "cpu"
    assert len(found.drafted) == drafted * (UNITS * 3 // 4 if in_memory else UNITS)
    assert not drafted or {0, 5} <= found.drafted


def test_second_slots_are_part_of_the_plan(tmp_path: Path) -> None:
    """Each state of a drafted unit has one, which overlaps nothing."""
    plan, single = planned(tmp_path), planned(tmp_path, speculate=False)
    spares = plan.placement.spares
    assert set(spares) == {(unit, state) for unit in range(UNITS) for state in (State.PARAM, State.OPTIM)}
    more = sum(aligned(extent.nbytes) for extent in spares.values())
    assert plan.nbytes()["nvme"] == single.nbytes()["nvme"] + more
    spans = sorted((e.offset, e.offset + e.nbytes) for e in (*plan.placement.extents.values(), *spares.values()))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert plan.io is not None and spans[-1][1] <= plan.io.nbytes
    durable = planned(tmp_path, durable=True)
    assert durable.drafted and not durable.placement.spares  # the slots of commits serve


@given(share=st.floats(0, 1))
def test_units_are_drafted_as_far_as_there_is_room(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Spread evenly over the model."""
    folder = tmp_path_factory.getbasetemp()
    whole, none = (planned(folder, **{"speculate": each}) for each in ("auto", False))
    room = int((whole.nbytes()["nvme"] - none.nbytes()["nvme"]) * share)
    limit = none.peak_nbytes()[TierKind.NVME] + room
    plan = planned(folder, memory={"nvme": limit})
    assert plan.peak_nbytes()[TierKind.NVME] <= limit
    assert len(plan.drafted) >= int(share * UNITS) - 2
    blocks = sorted(plan.drafted & set(range(1, UNITS - 1)))
    gaps = [after - before for before, after in pairwise(blocks)]
    assert not gaps or max(gaps) <= min(gaps) + 2


def test_a_full_disk_takes_drafts_away_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space bounds the second slots; the states themselves need what they need."""
    none = planned(tmp_path, speculate=False).peak_nbytes()[TierKind.NVME]
    monkeypatch.setattr("infinity.engine.platform.free_on_each", lambda folders: none + (256 << 10))
    plan = planned(tmp_path)
    assert len(plan.drafted) < UNITS and plan.peak_nbytes()[TierKind.NVME] <= none + (128 << 10)
    model = seeded(lambda: Stack(32, UNITS - 2))
    with infinity.initialize(model=model, config=engine_config(folder=tmp_path, clip=1.0), device=CpuDevice())[0] as e:
        assert e.ledger.tier_bytes()["nvme"] == plan.nbytes()["nvme"]


def test_space_that_each_folder_has_counts(tmp_path: Path) -> None:
    """Two folders on one file system share its space."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, two = resolved.free_on_each([str(folders[0])]), resolved.free_on_each([str(each) for each in folders])
    assert abs(one - two) < one // 10

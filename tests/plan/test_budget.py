"""Which states a budget keeps in host memory, and which budgets are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import nn

import infinity
from infinity.comm.communicator import Communicator
from infinity.config import Config
from infinity.engine import budget as resolved
from infinity.engine.platform import Platform
from infinity.engine.wiring import plan_model
from infinity.errors import ConfigError, OutOfMemoryError, StorageError
from infinity.plan import budget as budgets, plan as plans
from infinity.plan.budget import Faster, spread
from infinity.plan.placement import State, aligned
from infinity.plan.plan import Plan
from infinity.plan.shortage import shortage, spare
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from infinity.update.kernels import NATIVE
from support.configs import engine_config
from support.late_device import LateDevice
from support.models import Stack, seeded


def planned(folder: Path, host: Any = None, *, late: bool = False, model: str = "small", **options: Any) -> Plan:
    if host is not None:
        options["memory"] = {"host": host}
    config, built, device = engine_config(folder=folder, **options), stack(model), CpuDevice()
    seam = LateDevice() if late else device
    return plan_model(built, config, [{"params": list(built.parameters())}], seam, Communicator(seam)).plan


@cache
def stack(size: str) -> nn.Module:
    """A model to plan. The states of a deep one take more bytes than their buffers, those of a flat one fewer. The
    embedding of an uneven one is much larger than its layers, which have three sizes in an odd one.
    """
    if size in ("uneven", "odd"):
        widths = {"uneven": [128] * 100, "odd": [256, 16, 16]}[size]
        return seeded(lambda: nn.Sequential(nn.Embedding(4000, 128), *(nn.Linear(128, each) for each in widths)))
    width, depth = {"small": (32, 6), "deep": (256, 24), "flat": (128, 2)}[size]
    return seeded(lambda: Stack(width, depth))


def in_host(plan: Plan, state: State) -> int:
    return sum(e.nbytes for (_, kind), e in plan.placement.extents.items() if kind is state and e.tier == "host")


def share(plan: Plan, state: State) -> float:
    return in_host(plan, state) / sum(e.nbytes for (_, kind), e in plan.placement.extents.items() if kind is state)


UNEVEN: dict[str, Any] = {"tile_size": "auto", "unit_size": 4096}
CASES: dict[str, dict[str, Any]] = {"on arrival": {}, "clipping": {"clip": 1.0}, "accumulation": {"accumulation": 4}}


def order_of(case: str, *, late: bool) -> tuple[State, ...]:
    """Kinds in the order in which they get room."""
    if case == "accumulation":
        return State.PARAM, State.GRAD, State.OPTIM
    return (State.PARAM, State.OPTIM, State.GRAD) if late else (State.OPTIM, State.PARAM, State.GRAD)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["small", "deep", "uneven"])
def test_kinds_of_states_fill_host_memory_in_turn(model: str, case: str, late: bool, tmp_path: Path) -> None:
    """States that a step moves most often come first, and optimizer states if the host computes. A larger budget never
    holds fewer of the first kind, nor of another unless the ones before it get more.
    """
    options = {"late": late, "model": model, **CASES[case], **(UNEVEN if model == "uneven" else {})}
    bare = planned(tmp_path, **options)
    order, before, mixed = order_of(case, late=late), (0.0,), 0
    states = sum(aligned(extent.nbytes) for extent in bare.placement.extents.values())
    least = max(planned(tmp_path, 1, **options).peak_of_host(), 1)
    most = bare.peak_of_host() + states
    for host in [*range(least, most, (most - least) // 10), most]:
        plan = planned(tmp_path, host, **options)
        free = host - plan.peak_of_host()
        assert free >= 0
        shares = tuple(share(plan, state) for state in order)
        assert shares >= before
        before = shares
        mixed += any(0 < each < 1 for each in shares)
        left = [extent for extent in plan.placement.extents.values() if extent.tier == "nvme"]
        assert all(free < aligned(extent.nbytes) for extent in left), "room for one more"
    assert before == (1.0, 1.0, 1.0)
    assert mixed or model != "deep"


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["flat", "uneven"])
def test_budgets_from_the_least_on_are_accepted(model: str, case: str, late: bool, tmp_path: Path) -> None:
    """The bytes of the error are those of the smallest budget that is accepted. It keeps optimizer states in host
    memory here, where they take fewer bytes than the buffers with which they are read.
    """
    options: dict[str, Any] = {"late": late, "model": model, **UNEVEN, **CASES[case]}
    least = planned(tmp_path, 1, **options).peak_of_host()
    assert least < planned(tmp_path, **options).peak_of_host()
    for host in (1, least // 2, least - 4096, least - 1, least, least + 1, least + 65536, 2 * least, 8 * least):
        missing = shortage(planned(tmp_path, host, **options), {"host": 1 << 40, "device": 1 << 40})
        assert (missing is None) == (host >= least)
        assert missing is None or missing[2:4] == (least, host)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("case", CASES)
def test_the_least_budget_is_that_of_the_best_choice(
    case: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All choices of states are tried: no other one needs fewer bytes of host memory."""
    needs = []

    def fill(*arguments: Any) -> Faster:
        needs.append(arguments[-1])
        return budgets.fill(*arguments)

    monkeypatch.setattr(plans, "fill", fill)
    plan = planned(tmp_path, 1, late=late, model="odd", **UNEVEN, **CASES[case])
    states = [(unit.index, state) for unit in plan.units for state in State]
    assert len(plan.units) == 4 and len({unit.shard_numel for unit in plan.units}) == 3
    choices = chain.from_iterable(combinations(states, count) for count in range(len(states) + 1))
    assert plan.peak_of_host() == min(needs[0](dict.fromkeys(choice, TierKind.HOST)) for choice in choices)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_units_of_a_kind_are_spread_unless_updates_on_a_device_follow_gradients(
    clip: float, late: bool, tmp_path: Path
) -> None:
    """Backward then ends with the update of the first units, which nothing hides."""
    options: dict[str, Any] = {"clip": clip, "late": late, "model": "deep"}
    bare = planned(tmp_path, **options)
    first = order_of("clipping" if clip else "on arrival", late=late)[0]
    sizes = [aligned(bare.placement.of(unit.index, first).nbytes) for unit in bare.units]
    plan = planned(tmp_path, bare.peak_of_host() + sum(sizes) // 2, **options)
    kept = [unit.index for unit in plan.units if plan.placement.of(unit.index, first).tier == "host"]
    assert 2 < len(kept) < len(sizes) - 2
    assert (kept == list(range(len(kept)))) == (late and not clip)


def test_a_budget_that_buffers_exceed_is_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    least = planned(tmp_path, 1).peak_of_host()
    config = engine_config(folder=tmp_path, memory={"host": least - 1})
    said = rf"infinity\.memory\.host.*{least:,} bytes are needed.* 1 are missing; raise infinity\.memory\.host"
    with pytest.raises(OutOfMemoryError, match=said):
        infinity.initialize(model=seeded(Stack), config=config)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_nvme_is_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    needed = planned(tmp_path).peak_nbytes()["nvme"]
    for limit, fits in ((needed, True), (needed - 1, False)):
        config = engine_config(folder=tmp_path, memory={"nvme": limit})
        if fits:
            infinity.initialize(model=seeded(Stack), config=config)[0].close()
            continue
        with pytest.raises(OutOfMemoryError, match=r"infinity\.memory\.nvme.* 1 are missing"):
            infinity.initialize(model=seeded(Stack), config=config)


def test_a_limit_of_nvme_without_a_folder_is_refused() -> None:
    config = engine_config("cpu", "cpu").model_dump() | {"infinity": {"memory": {"nvme": "1GiB"}}}
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "cpu"}
    with pytest.raises(ConfigError, match=r"infinity\.memory\.nvme is set, and no state may be on nvme"):
        infinity.initialize(model=seeded(Stack), config=config)


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path / "none", memory={"nvme": "auto"})
    with pytest.raises(StorageError, match=r"none does not exist"):
        infinity.initialize(model=seeded(Stack), config=config)


def test_budgets_of_a_node_are_divided_over_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(folder=tmp_path, memory={"host": "1MiB", "nvme": "auto"})
    ranks = Communicator(CpuDevice())
    ranks.size = 16
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks.local_size == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(ranks, "size", 2)
    monkeypatch.setattr(ranks, "model", SimpleNamespace(size=2, gather=lambda mine: [mine]))
    budget = resolved.budget_of(config, ranks, computes_on_host=True, train=True, free_on_each=resolved.free_on_each)
    assert budget.host == (1 << 20) // 4 and budget.nvme, "two replicas of two tensor-parallel ranks share a node"


def test_parameters_in_host_memory_are_counted_in_elements(tmp_path: Path) -> None:
    """DeepSpeed's max_in_cpu."""
    content = engine_config(folder=tmp_path).model_dump() | {"infinity": {"unit_size": 4096}}
    whole = planned(tmp_path, unit_size=4096)
    numel = sum(layout.shard_numel for layout in whole.units)
    for kept in (0, numel // 2, numel, 10 * numel):
        content["zero_optimization"]["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(tmp_path),
            "max_in_cpu": kept,
        }
        config = Config.load(content)
        assert config.infinity.memory.host_params == kept
        model, seam = seeded(Stack), CpuDevice()
        plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
        elements = in_host(plan, State.PARAM) // 4
        assert elements <= kept and in_host(plan, State.OPTIM) == 0
        assert elements == numel if kept >= numel else elements > kept - max(x.shard_numel for x in plan.units)


def test_auto_leaves_memory_to_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "available_memory", lambda: 16 << 30)
    assert resolved.host_share(16 << 30, computes_on_host=True) == 8 << 30
    assert resolved.host_share(16 << 30, computes_on_host=False) == 13 << 30
    plan = planned(tmp_path, "auto")
    assert plan.budget.host == 8 << 30 and share(plan, State.OPTIM) == 1.0


def on_device(plan: Plan, state: State) -> list[int]:
    """Return the units with `state` on the device."""
    return [
        unit for (unit, kind), extent in plan.placement.extents.items() if kind is state and extent.tier == "device"
    ]


@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"bf16": True, "moments": "8bit", "accumulation": 2}], ids=str)
def test_states_fill_half_of_a_device_from_the_first_unit_on(options: dict[str, Any], tmp_path: Path) -> None:
    """Backward ends with the first units, which begin the next forward. Buffers have the sizes of a plan without a
    budget.
    """
    options = {"unit_size": 4096, "late": True, "param": "cpu", "optim": "cpu", **options}
    bare = planned(tmp_path, **options)
    sizes = [sum(aligned(bare.placement.of(unit.index, state).nbytes) for state in State) for unit in bare.units]
    buffers = bare.nbytes()["device"]
    for nbytes in range(buffers, buffers + sum(sizes) + 1, sum(sizes) // 8):
        plan = planned(tmp_path, memory={"device": 2 * nbytes}, **options)
        kept, room = [], nbytes - buffers
        for unit, size in enumerate(sizes):
            if size <= room:
                kept.append(unit)
                room -= size
        assert plan.peak_nbytes()["device"] == nbytes - room
        assert all(on_device(plan, state) == kept for state in State)
        assert plan.buffers_of("units") == bare.buffers_of("units") and plan.prefetch_bytes == bare.prefetch_bytes
        host = [pool.nbytes for pool in plan.pools if pool.name == "gradient shards"]
        assert planned(tmp_path, memory={"device_states": nbytes}, **options).placement == plan.placement
        assert bool(host) == (len(kept) < len(sizes)), "gradients that stay on the device need no buffers of the host"
    assert len(kept) == len(sizes)
    on_cpu = planned(tmp_path, **{**options, "late": False, "memory": {"device": 1 << 30}})
    assert on_cpu.placement == bare.placement, "the memory of a CPU is the host's"


@pytest.mark.parametrize("optim", ["cpu", "none"])
def test_frozen_units_stay_on_a_device_after_trained_ones(optim: str) -> None:
    """Parameters alone are spread over the model, since the link is in use in the whole step."""
    config, model, seam = engine_config("cpu", optim, unit_size=4096), seeded(Stack), LateDevice()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "blocks.1" in name

    def plan_with(nbytes: int | None) -> Plan:
        memory = config.infinity.memory.model_copy(update={"device": nbytes})
        limited = config.model_copy(update={"infinity": config.infinity.model_copy(update={"memory": memory})})
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        return plan_model(model, limited, groups, seam, Communicator(seam)).plan

    bare = plan_with(None)
    trained = {unit.index for unit in bare.units if unit.trainable}
    moved = tuple(State) if optim == "cpu" else (State.PARAM,)
    sizes = {key: aligned(extent.nbytes) for key, extent in bare.placement.extents.items() if key[1] in moved}
    first = sum(size for (unit, _), size in sizes.items() if unit in trained)
    kept = on_device(plan_with(2 * (bare.peak_nbytes()["device"] + first)), State.PARAM)
    assert set(kept) == trained if optim == "cpu" else {0, max(kept)} <= set(kept) and max(kept) > len(bare.units) // 2
    everything = plan_with(2 * (bare.peak_nbytes()["device"] + sum(sizes.values())))
    assert len(on_device(everything, State.PARAM)) == len(bare.units) > len(trained) > 0


def test_a_share_of_the_optimizer_states_on_the_device_is_counted_in_elements(tmp_path: Path) -> None:
    """DeepSpeed's `ratio`: the share that the host updates. It needs no limit, and places no parameters in stage 3.

    Below it, parameters are beside their optimizer states.
    """
    for late, stage in product((True, False), (2, 3)):
        content = engine_config("cpu" if stage == 3 else "none", "cpu", stage=stage, unit_size=4096).model_dump()
        seam = LateDevice() if late else CpuDevice()
        for ratio in (0.0, 0.3, 0.75, 1.0):
            section = {"unit_size": 4096, "memory": {"device": "1GiB"}} if ratio == 1.0 else {"unit_size": 4096}
            content["infinity"] = section
            content["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
            config, model = Config.load(content), seeded(Stack)
            plan = plan_model(model, config, [{"params": list(model.parameters())}], seam, Communicator(seam)).plan
            whole = sum(unit.shard_numel for unit in plan.units)
            there = sum(plan.units[unit].shard_numel for unit in on_device(plan, State.OPTIM))
            asked = (1 - ratio) * whole if late else 0
            assert asked - max(unit.shard_numel for unit in plan.units) < there <= asked
            if late:
                assert on_device(plan, State.PARAM) == ([] if stage == 3 else on_device(plan, State.OPTIM))


def test_a_share_that_the_device_cannot_hold_is_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"param": "cpu", "optim": "cpu", "late": True, "prefetch_bytes": 0}
    needed = planned(tmp_path, memory={"device_optimizer": 0.5}, **options).peak_nbytes()["device"]
    plan = planned(tmp_path, memory={"device_optimizer": 0.5, "device": needed - 1}, **options)
    missing = shortage(plan, {"host": 1 << 40, "device": 1 << 40})
    assert missing is not None and missing.needed - missing.available == 1


def test_states_that_the_device_cannot_hold_are_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"param": "cpu", "optim": "cpu", "late": True, "prefetch_bytes": 0}
    needed = planned(tmp_path, memory={"device_states": 1 << 30}, **options).peak_nbytes()["device"]
    plan = planned(tmp_path, memory={"device_states": 1 << 30, "device": needed - 1}, **options)
    missing = shortage(plan, {"host": 1 << 40, "device": 1 << 40})
    assert missing is not None and missing.needed - missing.available == 1


@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"bf16": True, "moments": "8bit"}], ids=str)
def test_device_memory_that_steps_leave_is_a_value_of_a_key(options: dict[str, Any], tmp_path: Path) -> None:
    """With it, states and buffers take no more bytes than were left, so what activations took stays free."""
    options = {"unit_size": 4096, "late": True, "param": "cpu", "optim": "cpu", **options}
    first = planned(tmp_path, memory={"device": 500_000}, **options)
    held, units = first.peak_nbytes()["device"], on_device(first, State.OPTIM)
    assert len(units) < len(first.units)
    least = min(
        sum(aligned(first.placement.of(unit.index, state).nbytes) for state in State)
        for unit in first.units
        if unit.index not in units
    )
    assert spare(first, least) == "", "a 16th is left for fragments"
    for unused in (least + least // 15 + 1, 2 * least, 1 << 30):
        given = re.search(r"set infinity\.memory\.device_states to (\d+)$", spare(first, unused))
        assert given is not None and int(given[1]) == held + unused - unused // 16
        plan = planned(tmp_path, memory={"device_states": int(given[1])}, **options)
        assert held < plan.peak_nbytes()["device"] <= held + unused
        assert len(on_device(plan, State.OPTIM)) > len(units)
    assert spare(plan, 1 << 30) == "", "all states are on the device"
    assert spare(planned(tmp_path, memory={"device_optimizer": 0.3}, **options), 1 << 30) == ""
    assert spare(planned(tmp_path, **{**options, "late": False}), 1 << 30) == ""


def test_a_device_whose_update_differs_is_not_filled(tmp_path: Path) -> None:
    """Without Infinity's kernels for the device, a budget would change the bits of the result."""
    config, model, seam = engine_config("cpu", "cpu", memory={"device": "1GiB"}), seeded(Stack), LateDevice()
    groups = [{"params": list(model.parameters())}]
    for exact in (True, False):
        platform = Platform()
        platform.kernels = replace(NATIVE, is_exact=lambda kind: exact)  # noqa: B023 - called in this iteration
        plan = plan_model(model, config, groups, seam, Communicator(seam), platform=platform).plan
        assert bool(on_device(plan, State.OPTIM)) == exact


@given(st.integers(0, 300))
def test_items_are_spread_evenly(count: int) -> None:
    """Neighbours among the first n items are at most twice as far apart as at the next power of two."""
    order = list(spread(range(count)))
    assert sorted(order) == list(range(count))
    for taken in (1, 2, 4, 8, 16, 32, 64, 128):
        if taken <= count // 2:
            gaps = [b - a for a, b in pairwise(sorted(order[:taken]))]
            assert max(gaps, default=0) <= 2 * (1 << (count - 1).bit_length()) // taken

"""Predictions without bandwidths: activations of deep models from those of one and two blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.plan.placement import State
from infinity.sim import planner
from infinity.sim.gpt2 import GPT2Config, PlannedModel, gpt2
from infinity.sim.machine import Links, Machine
from infinity.sim.planner import Activations, predict
from infinity.tier_kind import TierKind
from support.configs import engine_config

LINKS = Links(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, {"float32": 1e12}, 0)
SHAPE = GPT2Config(vocab_size=96, seq_length=16, num_layers=7, hidden_size=64, num_attention_heads=4)
HOST = Machine(8 << 30, 1 << 30, processors=1)
MACHINES = [HOST, replace(HOST, gpus=2, device_memory=1 << 30)]


@pytest.mark.parametrize("machine", MACHINES, ids=["host", "gpus"])
@pytest.mark.parametrize("tile_bytes", [None, 8 << 10], ids=["whole", "tiles"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_bytes_without_bandwidths_are_those_of_a_simulated_step(
    checkpoints: bool, tile_bytes: int | None, machine: Machine, tmp_path: Path
) -> None:
    shape = replace(SHAPE, checkpoint_activations=checkpoints, tie_word_embeddings=tile_bytes is None)
    config = engine_config(folder=tmp_path, debug=False, clip=1.0)
    counted = predict(lambda: gpt2(shape, tile_bytes), config, machine, None)
    links = replace(LINKS, baseline_rss=planner.assumed_rss(gpt2(shape), machine))
    simulated = predict(lambda: gpt2(shape, tile_bytes), config, machine, links)
    assert simulated.simulation is not None and counted.simulation is None
    # Without bandwidths, deep models are extrapolated from shallow ones, which may hold another scalar at their peak.
    for tier in TierKind:
        assert counted.needs.tiers[tier] == pytest.approx(simulated.needs.tiers[tier], abs=16)
    assert counted.needs.peak == pytest.approx(simulated.needs.peak, abs=16)
    assert replace(counted.needs, tiers={}, peak={}) == replace(simulated.needs, tiers={}, peak={})
    assert counted.plan == simulated.plan


@pytest.mark.parametrize("machine", MACHINES, ids=["host", "gpus"])
def test_a_predicted_step_moves_the_bytes_of_every_later_one(machine: Machine, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, debug=False)
    step = predict(lambda: gpt2(SHAPE, None), config, machine, LINKS).simulation
    assert step is not None
    for later in (len(step.steps), len(step.steps) + 1):
        again = planner._simulated(gpt2(SHAPE, None), machine.resolved(config), machine, LINKS, steps=later)
        assert (again.nvme_bytes_read, again.nvme_bytes_written) == (step.nvme_bytes_read, step.nvme_bytes_written)


@pytest.mark.parametrize("machine", MACHINES, ids=["host", "gpus"])
@pytest.mark.parametrize("kind", ["Muon", "NAdam"])
def test_an_optimizer_without_a_native_rule(kind: str, machine: Machine, tmp_path: Path) -> None:
    """A step moves the records of the plan, also if the class reads values, which a simulation lacks."""
    config = engine_config(folder=tmp_path, debug=False, bf16=False, optimizer=kind)
    prediction = predict(lambda: gpt2(SHAPE, None), config, machine, LINKS)
    step, plan = prediction.simulation, prediction.plan
    assert step is not None
    optim = sum(e.nbytes for (_, state), e in plan.placement.extents.items() if state is State.OPTIM)
    assert any(layout.windows for layout in plan.units)
    assert optim <= step.nvme_bytes_written


@pytest.mark.parametrize("within", [0, 105, 175])
def test_a_peak_inside_a_block_gives_way_to_one_that_grows_with_depth(
    within: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wide block's recomputation holds the most in a shallow model, and what all blocks save in a deep one."""
    simulated: list[int] = []

    def simulate(blocks: int, *_: object, **__: object) -> SimpleNamespace:
        simulated.append(blocks)
        peak = max(within, 40 + 10 * blocks)
        return SimpleNamespace(working_bytes=peak, activation_bytes=30 + 10 * blocks, activations={})

    monkeypatch.setattr(planner, "_simulated", simulate)
    activations = Activations(lambda blocks: blocks, engine_config(folder=tmp_path), HOST)  # type: ignore[arg-type, return-value]
    for blocks in range(1, 1000):
        assert activations.of(blocks) == {"device": max(within, 40 + 10 * blocks)}
    assert len(set(simulated)) == len(simulated) and max(simulated) <= max(4, 4 * within // 10)


@pytest.mark.parametrize("machine", MACHINES, ids=["host", "gpus"])
@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_a_frozen_base_in_a_code_takes_fewer_bytes(param: str, machine: Machine, tmp_path: Path) -> None:
    """Matrices are frozen; biases and norms are trained. Decoding is simulated in both kinds of memory."""

    def make(layers: int = SHAPE.num_layers) -> PlannedModel:
        model = gpt2(replace(SHAPE, num_layers=layers), None)
        for parameter in model.module.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        return replace(model, with_blocks=make)

    held, read = {}, {}
    for format in ("as_is", "nf4"):
        config = engine_config(param, "cpu", folder=tmp_path, debug=False, frozen=format)
        found = predict(make, config, machine, LINKS)
        assert found.simulation is not None
        held[format] = found.needs.tiers[TierKind.of_config(param)]["params"]
        read[format] = found.simulation.nvme_bytes_read
    assert held["nf4"] < 0.5 * held["as_is"]
    assert read["nf4"] < 0.5 * read["as_is"] if param == "nvme" else read["nf4"] == 0

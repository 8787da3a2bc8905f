"""State formats and rules in the engine: the bits do not depend on where states live, and the losses are torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.tiers.device import Device
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, train, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches
from support.states import states_of

STEPS = 4
CHEAP = [("remainder", "bf16"), ("remainder", "8bit"), ("fp32", "8bit")]
RULES = ["AdamW", "Adam", "Adagrad", "Lion", "SGD", "AdEMAMix"]


def stack() -> nn.Module:
    return Stack(width=32, depth=4, tied=True)


def run(folder: Path, device: Device | None = None, batches: int = STEPS, **options: Any) -> Result:
    config = engine_config(folder=folder, **options)
    with open_engine(seeded(stack), config, device) as engine:
        losses = train(engine, token_batches(batches))
        return Result(losses, parameters_of(engine) | states_of(engine))


@pytest.mark.parametrize(("master", "moments"), CHEAP)
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_every_pair_of_tiers_gives_the_same_bits(master: str, moments: str, clip: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": True, "clip": clip, "master": master, "moments": moments}
    results = [run(tmp_path, param=param, optim=optim, **options) for param, optim in PLACEMENTS]
    results.append(run(tmp_path, LateDevice(delay=0.01), param="nvme", optim="cpu", **options))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_rounding_follows_from_seed_step_and_element_alone(moments: str, tmp_path: Path) -> None:
    """Tiles, threads, units, schedule, master: none of them changes a bit; the seed does."""
    options: dict[str, Any] = {"bf16": True, "moments": moments, "lr": 0.01}
    reference = run(tmp_path, **options)
    for other in (
        {"tile_size": 8192},
        {"adam_threads": 2},
        {"unit_size": 2048},
        {"update": "next_forward"},
        {"master": "fp32"},
        {"prefetch_bytes": 0},
    ):
        assert_same(run(tmp_path, **(options | other)), reference)
    assert run(tmp_path, **options, seed=1).losses != reference.losses


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_with_every_format(rule: str, moments: str, bf16: bool, tmp_path: Path) -> None:
    config = engine_config(
        folder=tmp_path, optimizer=rule, moments=moments, bf16=bf16, lr={"Adagrad": 0.02, "SGD": 0.2}.get(rule, 2e-3)
    )
    batches = token_batches(2) * 6
    with open_engine(seeded(stack), config) as engine:
        losses = train(engine, batches)
        kinds = engine.parts.states.kinds(engine.units[0].layout)
        assert {name.rpartition("/")[2] for name in states_of(engine)} == {kind.name for kind in kinds}
    assert sum(losses[-2:]) < sum(losses[:2])


@pytest.mark.parametrize(
    ("rule", "kind", "constants"),
    [
        ("Adagrad", torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.01, "eps": 1e-10, "weight_decay": 0.1}),
        ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
        ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        ("SGD", torch.optim.SGD, {"lr": 0.05}),
    ],
)
def test_rules_are_those_of_torch(rule: str, kind: Any, constants: dict[str, Any], tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, unit_size=2048).model_copy(deep=True)
    config = type(config).load(
        {**config.model_dump(exclude_defaults=True), "optimizer": {"type": rule, "params": constants}}
    )
    batches = [vector_batches(4)[i % 4] for i in range(12)]
    model = seeded(lambda: Linears(depth=6))
    optimizer = kind(model.parameters(), **constants)
    losses = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})
    assert_close(trained(seeded(lambda: Linears(depth=6)), batches, config), expected)


@pytest.mark.parametrize(("moments", "away"), [("bf16", 0.02), ("8bit", 0.05)])
def test_cheap_moments_stay_near_exact_ones(moments: str, away: float, tmp_path: Path) -> None:
    """Losses of 20 steps, relative: a wrong scale, sign or root would show at once."""
    exact = run(tmp_path, batches=20, lr=3e-3)
    cheap = run(tmp_path, batches=20, lr=3e-3, moments=moments)
    assert cheap.losses != exact.losses
    assert max(abs(a - b) / b for a, b in zip(cheap.losses, exact.losses, strict=True)) < away

"""param_groups, schedulers and the gradient norm, against torch.optim and torch.nn.utils."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, UsageError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import Result, assert_close, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches

STEPS = 12


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return three groups that cut through units: matrices, vectors without decay, embeddings with their own rate."""
    named = list(model.named_parameters())
    embeddings = [p for name, p in named if "embedding" in name]
    matrices = [p for name, p in named if "embedding" not in name and p.dim() > 1]
    vectors = [p for _, p in named if p.dim() == 1]
    return [
        {"params": matrices, "weight_decay": 0.2},
        {"params": vectors, "weight_decay": 0.0, "lr": 5e-3, "betas": (0.8, 0.95)},
        {"params": embeddings, "lr": 1e-4, "eps": 1e-6},
    ]


def reference(config: Config, halve_at: int = STEPS + 1, freeze: int | None = None) -> Result:
    model = seeded(Stack)
    params = config.optimizer.params
    groups = groups_of(model)
    if freeze is not None:
        del groups[freeze]
    optimizer = torch.optim.AdamW(groups, lr=params.lr, eps=params.eps, weight_decay=params.weight_decay)
    losses = []
    for step, batch in enumerate(token_batches(STEPS)):
        if step == halve_at:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        loss = model(*batch)
        loss.backward()
        if config.gradient_clipping > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("update", ["auto", "next_forward"])
def test_groups_within_one_unit(clip: float, update: str, tmp_path: Path) -> None:
    """Every group has its own lr, betas, eps and weight_decay; a user's change of lr counts from its step on."""
    config = engine_config(folder=tmp_path, clip=clip, update=update)
    model = seeded(Stack)
    losses = []
    with TrainingEngine(model, config, groups_of(model), device=CpuDevice()) as engine:
        cut = [len({slot.group for slot in unit.layout.slots}) for unit in engine.parts.units]
        assert max(cut) > 1, "no unit has several groups"
        for step, batch in enumerate(token_batches(STEPS)):
            if step == 5:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= 0.5
            losses += train(engine, [batch])
        ours = Result(losses, parameters_of(engine))
    assert_close(ours, reference(config, halve_at=5))


@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
def test_a_rate_that_changes_between_backward_and_step(update: str, tmp_path: Path) -> None:
    """The new rate counts for the step, as in torch, or is rejected if units were updated with the old one."""
    losses = []
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, update=update)) as engine:
        group = engine.optimizer.param_groups[0]
        for step, batch in enumerate(token_batches(STEPS)):
            loss = engine(*batch)
            engine.backward(loss)
            if step == 5:
                before = group["lr"]
                group["lr"] *= 0.5
                if update == "during_backward":
                    with pytest.raises(UsageError, match=r"lr of param_group 0 changed between backward and engine"):
                        engine.step()
                    group["lr"] = before
            engine.step()
            losses.append(loss.item())
        ours = Result(losses, parameters_of(engine))
    model = seeded(Stack)
    config = engine_config(folder=tmp_path, update=update)
    halve_at = STEPS + 1 if update == "during_backward" else 5
    params = config.optimizer.params
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=params.lr, betas=params.betas, eps=params.eps, weight_decay=params.weight_decay
    )
    losses = []
    for step, batch in enumerate(token_batches(STEPS)):
        loss = model(*batch)
        loss.backward()
        if step == halve_at:
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_close(ours, Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()}))


CHANGES: dict[str, Any] = {
    "pop": lambda groups: groups[1]["params"].pop(),
    "empty": lambda groups: groups[2].update(params=[]),
    "move": lambda groups: groups[0]["params"].append(groups[1]["params"].pop()),
    "swap": lambda groups: groups.reverse(),
    "delete": lambda groups: groups.pop(),
    "append": lambda groups: groups.append({**groups[0], "params": [groups[1]["params"].pop()]}),
    "maximize": lambda groups: groups[1].update(maximize=True),
    "amsgrad": lambda groups: groups[1].update(amsgrad=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("update", ["auto", "next_forward"])
def test_groups_that_change(change: str, update: str, tmp_path: Path) -> None:
    """torch.optim trains the parameters in param_groups at each step. An engine rejects changes, and continues once
    they are undone.
    """
    config, model = engine_config(folder=tmp_path, update=update), seeded(Stack)
    with TrainingEngine(model, config, groups_of(model), device=CpuDevice()) as engine:
        batches = token_batches(STEPS)
        losses = train(engine, batches[:5])
        groups = [{**group, "params": list(group["params"])} for group in engine.optimizer.param_groups]
        CHANGES[change](engine.optimizer.param_groups)
        with pytest.raises(UsageError, match=r"undo the change|unset it"):
            train(engine, [batches[5]])
        engine.optimizer.param_groups[:] = groups
        losses += train(engine, batches[5:])
        ours = Result(losses, parameters_of(engine))
    assert_close(ours, reference(config))


def test_a_parameter_of_no_group_stays(tmp_path: Path) -> None:
    """As in torch, a parameter outside of all groups gets gradients and no update."""
    config = engine_config(folder=tmp_path)
    model = seeded(Stack)
    with TrainingEngine(model, config, groups_of(model)[:2], device=CpuDevice()) as engine:
        ours = Result(train(engine, token_batches(STEPS)), parameters_of(engine))
    assert torch.equal(ours.parameters["embedding.weight"], seeded(Stack).get_parameter("embedding.weight"))
    assert_close(ours, reference(config, freeze=2))


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6, "warmup_max_lr": 4e-3},
    "WarmupDecayLR": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 1e-4, "total_num_steps": 10},
    "WarmupCosineLR": {"warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 10},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_scheduler(name: str, clip: float, accumulation: int, tmp_path: Path) -> None:
    """The config's schedule equals torch's AdamW with the same rates, set by hand."""
    base = engine_config(folder=tmp_path, clip=clip, lr=3e-3, accumulation=accumulation)
    raw = base.model_dump(mode="json", exclude_unset=True)
    config = Config.load({**raw, "scheduler": {"type": name, "params": SCHEDULES[name]}})
    batches = token_batches(STEPS * accumulation)
    rates = []
    with open_engine(seeded(Stack), config) as engine:
        losses = []
        for batch in batches:
            rates.append(engine.optimizer.param_groups[0]["lr"])
            losses += train(engine, [batch])
        ours = Result(losses, parameters_of(engine))
    rates = rates[::accumulation]
    assert len(set(rates)) > 5, rates

    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    expected = []
    for number, batch in enumerate(batches):
        loss = model(*batch)
        (loss / accumulation).backward()
        expected.append(loss.item())
        if (number + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.param_groups[0]["lr"] = rates[number // accumulation]
            optimizer.step()
            optimizer.zero_grad()
    assert_close(ours, Result(expected, {n: p.detach().clone() for n, p in model.named_parameters()}))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradient_norm(accumulation: int, tied: bool, tmp_path: Path) -> None:
    """The norm is within 1e-6 of torch.nn.utils.clip_grad_norm_'s in every step."""
    config = engine_config(folder=tmp_path, clip=0.1, accumulation=accumulation)
    batches = token_batches(6 * accumulation)
    model, twin = seeded(lambda: Stack(tied=tied)), seeded(lambda: Stack(tied=tied))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(model, config) as engine:
        for start in range(0, len(batches), accumulation):
            for batch in itertools.islice(batches, start, start + accumulation):
                train(engine, [batch])
                (twin(*batch) / accumulation).backward()
            expected = float(nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
            norm = engine.get_global_grad_norm()
            assert norm is not None
            assert abs(norm - expected) <= 1e-6 * expected
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("key", ["momentum", "moments", "amsgrad"])
def test_what_a_group_cannot_have_is_refused_and_not_ignored(key: str) -> None:
    model = seeded(Stack)
    with pytest.raises(ConfigError, match=rf"a param_group has '{key}', which adamw does not use"):
        TrainingEngine(model, engine_config(), [{"params": model.parameters(), key: 0.9}], device=CpuDevice())

"""fp16: as a plain loop with an fp32 master and the same loss scale; steps that overflow change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, NonFiniteError, UsageError
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_close, assert_same, call, open_engine, parameters_of, plain_16, train, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches
from support.states import states_of

FIXED = {"loss_scale": 1024}
STEPS = 12


def stack() -> nn.Module:
    return Stack(width=32, depth=4, tied=True)


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (1, 0.3), (3, 0.3)])
def test_as_a_plain_loop(accumulation: int, clip: float, tmp_path: Path) -> None:
    """Losses within 1 %, parameters within 2 %: fp16 gradients of one element differ in their last bit now and then."""
    config = engine_config(folder=tmp_path, fp16=FIXED, lr=3e-3, accumulation=accumulation, clip=clip)
    batches = token_batches(2 * accumulation) * (STEPS // 2)
    found = trained(seeded(stack), batches, config)
    expected = plain_16(seeded(stack), batches, config, call, torch.float16, 1024.0)
    assert_close(found, expected, loss=0.01, parameters=0.02)
    assert sum(found.losses[-2 * accumulation :]) < sum(found.losses[: 2 * accumulation])


def test_small_gradients_are_kept_by_the_scale(tmp_path: Path) -> None:
    """Gradients below the smallest fp16 number: without a scale nothing moves."""

    def tiny(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(*batch).float() * 2.0**-26

    batches = [(x.half(), y) for x, y in vector_batches(4)]
    moved = []
    for scale in (1, 2**20):
        config = engine_config(folder=tmp_path, fp16={"loss_scale": scale}, eps=1e-12, weight_decay=0.0, unit_size=2048)
        model = seeded(lambda: Linears(depth=6))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        after = trained(model, batches, config, loss_of=tiny).parameters
        moved.append(sum(float((after[name] - value).abs().sum()) for name, value in before.items()))
    assert moved[0] < 0.2 * moved[1]


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_every_pair_of_tiers_gives_the_same_bits(moments: str, tmp_path: Path) -> None:
    """Overflows at the start included: the first scale is too large."""
    results = []
    for number, (param, optim) in enumerate([*PLACEMENTS, ("nvme", "cpu")]):
        config = engine_config(param, optim, folder=tmp_path, fp16={"initial_scale_power": 20}, moments=moments)
        device = LateDevice(delay=0.01) if number == len(PLACEMENTS) else None
        with open_engine(seeded(stack), config, device) as engine:
            losses = train(engine, token_batches(8))
            assert engine.skipped_steps > 1 and engine.loss_scale.value < 2**20
            results.append(Result(losses, parameters_of(engine) | states_of(engine)))
    for result in results[1:]:
        assert_same(result, results[0])


def test_a_step_that_overflows_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, fp16={"initial_scale_power": 8, "hysteresis": 1}, clip=1.0)
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    config = type(config).load({**config.model_dump(exclude_defaults=True), **schedule})
    batches = token_batches(4)
    with open_engine(seeded(stack), config) as engine:
        train(engine, batches[:2])
        before, rate = parameters_of(engine) | states_of(engine), engine.optimizer.param_groups[0]["lr"]
        engine.loss_scale.value = 2.0**40
        train(engine, batches[2:3])
        assert (engine.global_steps, engine.skipped_steps, engine.loss_scale.value) == (3, 1, 2.0**39)
        assert engine.get_global_grad_norm() is None and engine.optimizer.param_groups[0]["lr"] == rate
        after = parameters_of(engine) | states_of(engine)
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        engine.loss_scale.value = 2.0**8
        losses = train(engine, batches[3:])
    with open_engine(seeded(stack), config) as engine:
        train(engine, batches[:2])
        assert train(engine, batches[3:]) == losses


def test_the_scale_is_saved_and_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fp16": {"initial_scale_power": 20, "loss_scale_window": 3}}
    batches = token_batches(20)
    with open_engine(seeded(stack), engine_config(**options)) as engine:
        train(engine, batches[:10])
        engine.save_checkpoint(tmp_path)
        skipped = engine.skipped_steps
        expected = train(engine, batches[10:]), engine.loss_scale, engine.skipped_steps
    assert skipped
    with open_engine(seeded(stack, 7), engine_config("cpu", "none", **options)) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.skipped_steps == skipped
        assert (train(engine, batches[10:]), engine.loss_scale, engine.skipped_steps) == expected


def test_overflows_at_the_smallest_scale_end_in_an_error(tmp_path: Path) -> None:
    """Overflows at the smallest scale raise an error instead of an endless loop."""

    def infinite(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(*batch) * float("inf")

    config = engine_config(folder=tmp_path, fp16={"initial_scale_power": 2, "hysteresis": 1})
    with open_engine(seeded(stack), config) as engine:
        train(engine, token_batches(2))
        with pytest.raises(NonFiniteError, match=r"20 steps in a row were skipped.*smallest loss scale, 1"):
            train(engine, token_batches(1) * 40, infinite)
        assert engine.skipped_steps == 22
        assert all(loss == loss for loss in train(engine, token_batches(2)))


def test_a_backward_of_the_users_own(tmp_path: Path) -> None:
    results = []
    for own in (False, True):
        config = engine_config(folder=tmp_path, fp16=FIXED, accumulation=2)
        with open_engine(seeded(stack), config) as engine:
            losses = []
            for batch in token_batches(6):
                loss = engine(*batch)
                losses.append(loss.item())
                if own:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            results.append(Result(losses, parameters_of(engine)))
    assert_same(*results)


def test_a_backward_of_the_users_own_without_the_scale_is_refused(tmp_path: Path) -> None:
    """The gradients lack the loss scale by which the update divides them."""
    config = engine_config(folder=tmp_path, fp16={"initial_scale_power": 8})
    batches = token_batches(3)
    with open_engine(seeded(stack), config) as engine:
        expected = train(engine, batches)
    with open_engine(seeded(stack), config) as engine:
        losses = train(engine, batches[:1])
        engine(*batches[1]).backward()
        with pytest.raises(UsageError, match=r"engine.scale\(loss\).backward"):
            engine.step()
        assert [*losses, *train(engine, batches[1:])] == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and fp16 are both enabled: choose one"),
        ({"fp16": {"enabled": True}, "infinity": {"update": "during_backward"}}, "but fp16 needs the norm of all"),
        ({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}}, "both enabled: choose one"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16: min_loss_scale must be more than 0"),
    ],
)
def test_configurations_that_make_no_sense(config: dict[str, Any], says: str) -> None:
    from infinity.config import Config

    with pytest.raises(ConfigError, match=says):
        Config.load(config)

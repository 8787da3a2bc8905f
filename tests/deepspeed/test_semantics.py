"""Behaviour of DeepSpeed's engine in unusual calls: derivatives, scales, overflows in bf16, tags and checks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, jacrev, vmap

import infinity.deepspeed as deepspeed
from infinity.errors import ConfigError, ModelError, NonFiniteError, UsageError
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]
BATCHES = token_batches(6)


class Scalar(nn.Module):
    """Returns one number for a vector; some parameters are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.up.weight
        self.norm = nn.BatchNorm1d(6).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.up(x))).square().sum()


# -- torch.func --------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda call, x: grad(call)(x),
    "grad and value": lambda call, x: grad_and_value(call)(x),
    "jacrev": lambda call, x: jacrev(call)(x),
    "grad of grad": lambda call, x: grad(lambda y: grad(call)(y).sum())(x),
    "vmap of grad": lambda call, x: vmap(grad(call))(torch.stack([x, x + 1])),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_derivative_through_the_engine(name: str, stage: int, opens: Opens) -> None:
    """Stages 0 to 2 return the model's derivative, undivided by accumulation; stage 3 refuses. Training goes on."""
    model = seeded(Scalar)
    reference = copy.deepcopy(model)
    engine = opens(stage, model=model, gradient_accumulation_steps=2)
    x = torch.randn(6)
    if stage == 3:
        with pytest.raises(UsageError, match=r"torch\.func"):
            TRANSFORMS[name](engine, x)
    else:
        torch.testing.assert_close(TRANSFORMS[name](engine, x), TRANSFORMS[name](reference, x))
    before = engine.module.up.weight.detach().clone()
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    assert engine.global_steps == 1 and not torch.equal(engine.module.up.weight.detach(), before)


# -- scales and overflows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_without_the_scale_is_refused_in_backward(stage: int, opens: Opens) -> None:
    engine = opens(stage, fp16={"enabled": True, "initial_scale_power": 8})
    loss = engine(*BATCHES[0])
    with pytest.raises(UsageError, match=r"Loss scaling is required.*not scaled by 256.*engine\.scale\(loss\)"):
        loss.backward()
    engine.scale(engine(*BATCHES[1])).backward()
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()


def test_scale_and_backward_take_scalars_only(opens: Opens) -> None:
    engine = opens()
    loss = engine(*BATCHES[0])
    for wrong, says in ((loss * torch.ones(3), r"has shape \[3\]"), (loss.detach(), "no graph"), (1.0, "is a float")):
        for call in (engine.scale, engine.backward):
            for error in (UsageError, AssertionError):
                with pytest.raises(error, match=f"scalar tensor.*{says}"):
                    call(wrong)
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bf16_step_with_an_overflow_is_skipped(stage: int, bad: float, opens: Opens) -> None:
    """The step changes nothing but the counters, and the scheduler does not advance; the next step equals the plain
    sequence without the batch.
    """
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    config = {"bf16": {"enabled": True}, "scheduler": schedule}
    expected, engine = opens(stage, **config), opens(stage, **config)
    for number, batch in enumerate(BATCHES[:4]):
        loss = engine(*batch)
        engine.backward(loss * bad if number == 2 else loss)
        engine.step()
        assert engine.was_step_applied() is (number != 2)
        if number != 2:
            expected.backward(expected(*batch))
            expected.step()
    assert (engine.global_steps, engine.skipped_steps) == (4, 1) and engine.get_lr() == expected.get_lr()
    assert engine.get_global_grad_norm() is not None
    for ours, theirs in zip(engine.module.state_dict().values(), expected.module.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_twenty_overflows_in_a_row_end_bf16_training(opens: Opens) -> None:
    engine = opens(bf16={"enabled": True})
    with pytest.raises(NonFiniteError, match=r"^20 steps in a row were skipped.*infinite: the model diverges"):
        for _ in range(30):
            engine.backward(engine(*BATCHES[0]) * float("nan"))
            engine.step()
    assert engine.skipped_steps == 20


def test_updates_during_backward_skip_no_step(opens: Opens) -> None:
    """A NaN loss is an error before an update, and training goes on; with updates in the next forward it is skipped."""
    engine = opens(3, bf16={"enabled": True}, gradient_clipping=0.0)
    with pytest.raises(NonFiniteError, match=r"the loss is nan.*updated nothing"):
        engine.backward(engine(*BATCHES[0]) * float("nan"))
    other = opens(
        3, bf16={"enabled": True}, gradient_clipping=0.0, infinity={"unit_size": 20_000, "update": "next_forward"}
    )
    other.backward(other(*BATCHES[0]) * float("nan"))
    other.step()
    assert (engine.skipped_steps, other.skipped_steps) == (0, 1)
    for each in (engine, other):
        each.backward(each(*BATCHES[1]))
        each.step()
    assert torch.equal(engine.module.head.weight.detach(), other.module.head.weight.detach())


def test_an_overflow_is_an_error_or_ignored_where_it_is_not_skipped(opens: Opens) -> None:
    """fp32 raises before a change; bf16.check_grad_overflow false updates with the values, as in DeepSpeed."""
    engine = opens()
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        engine.backward(engine(*BATCHES[0]) * float("nan"))
    engine = opens(bf16={"enabled": True, "check_grad_overflow": False})
    engine.backward(engine(*BATCHES[0]) * float("nan"))
    engine.step()
    assert engine.skipped_steps == 0 and engine.module.head.weight.isnan().any()


# -- models and states in 16 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_trains_in_its_dtype(dtype: torch.dtype, stage: int, opens: Opens) -> None:
    """Without a section in the config, as with the section of its dtype and without a loss scale."""
    section = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {"fp16": {"enabled": True, "loss_scale": 1}}
    found = []
    for config in ({}, section, {"bf16": {"enabled": False}, "fp16": {"enabled": False}}):
        engine = opens(stage, model=seeded(Stack).to(dtype), **config)
        for batch in BATCHES[:3]:
            engine(*batch).backward()
            engine.step()
        assert engine.get_data_types()[0] == dtype and engine.module.head.weight.dtype == dtype
        found.append(engine.module_state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value) and torch.equal(found[2][name], value)


def test_a_model_in_two_dtypes_is_refused(opens: Opens) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ModelError, match=r"1\.weight is bfloat16"):
        opens(model=model)
    runner, *_ = deepspeed.initialize(model=nn.Linear(2, 2).bfloat16(), config={"train_batch_size": 1})
    assert runner(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    runner.destroy()


def test_states_of_16_bits(opens: Opens) -> None:
    """bf16.bf16_optimizer_states selects moments in bf16, and training equals that of the engine's own keys."""
    theirs = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    own = {"unit_size": 20_000, "moments": "bf16"}
    engine = opens(bf16=theirs)
    other = opens(bf16={"enabled": True}, infinity=own, data_types={"grad_accum_dtype": "bf16"})
    config = engine.training_engine.config
    assert config.infinity.master == "remainder" and config.infinity.moments == "bf16"
    assert config.data_types.grad_accum_dtype == "bf16"
    for batch in BATCHES[:3]:
        for each in (engine, other):
            each.backward(each(*batch))
            each.step()
    assert torch.equal(engine.module.head.weight, other.module.head.weight)


def test_a_clients_adam_must_have_the_configs_states(opens: Opens) -> None:
    model = seeded(Stack)
    config = {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "optimizer": None}
    wrong = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters())
    with pytest.raises(AssertionError, match="construct DeepSpeedCPUAdam with fp32_optimizer_states=False"):
        opens(model=model, given={"optimizer": wrong}, **config)
    right = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    assert opens(model=model, given={"optimizer": right}, **config).optimizer.rule == "adamw"


# -- checks ------------------------------------------------------------------------------------------------------------


def test_checks_are_assertion_errors_too(opens: Opens) -> None:
    for error in (AssertionError, ModelError):
        with pytest.raises(error, match="no model"):
            deepspeed.initialize(config={"train_batch_size": 1})

    model = nn.Linear(2, 2)
    for error in (AssertionError, ConfigError):
        with pytest.raises(error, match="which an engine cannot apply"):
            opens(model=model, given={"optimizer": torch.optim.LBFGS(model.parameters())})
    sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    for error in (AssertionError, ConfigError):
        with pytest.raises(error, match="train_batch_size"):
            deepspeed.DeepSpeedConfig(sizes)
        with pytest.raises(error, match="train_batch_size"):
            deepspeed.initialize(model=nn.Linear(2, 2), config=sizes)
    engine = opens(managed_gradient_accumulation=False)
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    engine = opens()
    with engine.no_sync():
        engine.backward(engine(*BATCHES[0]))
        for error in (AssertionError, UsageError):
            with pytest.raises(error, match="no_sync"):
                engine.step()
    for folder in (None, ""):
        with pytest.raises(ValueError, match="save_dir is"):
            engine.save_checkpoint(folder)


@pytest.mark.parametrize("mode", ["Ignore", "warn", "FAIL"])
def test_the_validation_of_tags_is_read_in_any_case(mode: str, opens: Opens) -> None:
    engine = opens(checkpoint={"tag_validation": mode})
    assert engine.checkpoint_tag_validation_enabled() is (mode != "Ignore")
    assert engine.checkpoint_tag_validation_fail() is (mode == "FAIL")


def test_an_unknown_validation_of_tags_is_refused(opens: Opens) -> None:
    with pytest.raises(ConfigError, match=r'checkpoint\.tag_validation: must be "Ignore", "Warn" or "Fail", not .foo.'):
        opens(checkpoint={"tag_validation": "foo"})


def test_an_unknown_warm_up_is_logarithmic(caplog: pytest.LogCaptureFixture) -> None:
    make = deepspeed.runtime.lr_schedules.WarmupLR
    rates = []
    for kind in ("log", "cubic"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        with caplog.at_level(logging.WARNING, "infinity"):
            scheduler = make(optimizer, warmup_num_steps=5, warmup_type=kind)
        for _ in range(3):
            scheduler.step()
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] and "cubic" in caplog.text


def test_a_checkpoint_has_the_folder_of_its_tag(tmp_path: Path, opens: Opens) -> None:
    engine = opens()
    engine.save_checkpoint(tmp_path, tag="first")
    assert (tmp_path / "first").is_dir() and (tmp_path / "latest").read_text() == "first"

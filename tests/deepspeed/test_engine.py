"""`DeepSpeedEngine`: DeepSpeed's loop equals a plain one, and it behaves as an nn.Module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import nn
from torch.utils.data import TensorDataset

import infinity
import infinity.deepspeed as deepspeed
from infinity.errors import CheckpointError, UsageError
from support.models import Linears, Stack, seeded, token_batches, vector_batches

Opens = Callable[..., Any]


def plain(
    batches: list[Any], *, accumulation: int = 1, clip: float = 1.0, lr: float = 1e-3, factor: float = 1.0
) -> nn.Module:
    """Train a Stack with torch's AdamW without decay, as DeepSpeed's Adam, and return it. factor: of all losses."""
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for number, batch in enumerate(batches, 1):
        (model(*batch) * factor / accumulation).backward()
        if number % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def run(engine: Any, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def same(engine: Any, model: nn.Module) -> None:
    trained = engine.module_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_equals_a_plain_loop_with_deepspeeds_defaults(opens: Opens, stage: int, accumulation: int) -> None:
    """Adam is decoupled without decay, and gradients are clipped to 1.0, though the config says neither."""
    batches = token_batches(4)
    engine = opens(stage, gradient_accumulation_steps=accumulation)
    run(engine, batches)
    same(engine, plain(batches, accumulation=accumulation))
    assert engine.gradient_clipping() == 1.0
    assert engine.get_global_grad_norm() > 1.0


def test_adam_w_mode_false_is_l2(opens: Opens) -> None:
    """`adam_w_mode: false` adds the decay to the gradient, as torch.optim.Adam."""
    batches = token_batches(3)
    params = {"lr": 1e-2, "weight_decay": 0.3, "adam_w_mode": False}
    engine = opens(optimizer={"type": "Adam", "params": params}, gradient_clipping=0.0)
    run(engine, batches)
    model = seeded(Stack)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3)
    for batch in batches:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(engine, model)
    assert engine.get_global_grad_norm() > 0


def test_counts_and_sizes(opens: Opens) -> None:
    """micro_steps counts calls of step; global_steps, global_samples and was_step_applied count updates."""
    engine = opens(gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (8, 4, 2)
    seen = []
    for batch in token_batches(4):
        boundary = engine.is_gradient_accumulation_boundary()
        loss = engine(*batch)
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
        engine.step()
        seen.append(
            (boundary, engine.was_step_applied(), engine.micro_steps, engine.global_steps, engine.global_samples)
        )
    assert seen == [(False, False, 1, 0, 0), (True, True, 2, 1, 8), (False, False, 3, 1, 8), (True, True, 4, 2, 16)]
    assert (engine.skipped_steps, engine.world_size, engine.dp_world_size, engine.global_rank) == (0, 1, 1, 0)
    engine.set_train_batch_size(8)
    with pytest.raises(UsageError, match=r"set_train_batch_size\(16\) was called, but the batch size is 8"):
        engine.set_train_batch_size(16)


def test_monitors_count_in_samples(opens: Opens, tmp_path: Path) -> None:
    """A row has the engine's samples and its next rate; DeepSpeed's schedules begin with two equal rates."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = opens(scheduler=schedule, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    expected = ["step,lr"]
    for batch in token_batches(3):
        run(engine, [batch])
        expected.append(f"{engine.global_samples},{engine.get_lr()[0]}")
    assert engine.monitor.enabled
    assert (tmp_path / "run" / "Train_Samples_lr.csv").read_text().split() == expected


def test_scale_wrt_gas_false_leaves_the_loss_to_the_caller(opens: Opens) -> None:
    """Losses that the caller has divided produce the same parameters, and backward returns them unchanged."""
    batches = token_batches(4)
    engine = opens(gradient_accumulation_steps=2)
    for batch in batches:
        loss = engine(*batch) / 2
        assert engine.backward(loss, scale_wrt_gas=False) is loss
        engine.step()
    same(engine, plain(batches, accumulation=2))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_micro_batch_ends_with_step(opens: Opens, stage: int) -> None:
    """Backwards of one micro-batch add up, and only calls of step count towards gradient_accumulation_steps."""
    batches = token_batches(4)
    engine = opens(stage, gradient_accumulation_steps=2)
    boundaries, updates = [], []
    for batch in batches:
        for _ in range(2):
            engine.backward(engine(*batch))
            boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
        updates.append(engine.global_steps)
    assert boundaries == [False, False, True, True] * 2
    assert updates == [0, 1, 1, 2]
    same(engine, plain([batch for batch in batches for _ in range(2)], accumulation=4, factor=2.0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_boundary_set_by_hand_ends_a_step(opens: Opens, stage: int) -> None:
    """Steps of one and of two micro-batches update where the caller says, as Accelerate does at the end of data."""
    batches = token_batches(3)
    engine = opens(stage, gradient_accumulation_steps=4, scheduler={"type": "WarmupLR", "params": {}})
    rates = []
    for batch, boundary in zip(batches, (True, False, True), strict=True):
        engine.set_gradient_accumulation_boundary(boundary)
        assert engine.is_gradient_accumulation_boundary() is boundary
        engine.backward(engine(*batch))
        if boundary:
            rates.append(engine.get_lr()[0])
            engine.step()
    assert engine.global_steps == 2
    assert engine.lr_scheduler.last_batch_iteration == 1  # from -1
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for part, rate in zip((batches[:1], batches[1:]), rates, strict=True):
        for batch in part:
            (model(*batch) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    same(engine, model)
    with pytest.raises(UsageError, match="without a backward"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_hold_their_values_between_steps_below_stage_3(opens: Opens, stage: int) -> None:
    """Parameters that the script keeps have the updated values, without a gather, in a model of many units."""
    engine = opens(stage)
    held = dict(engine.module.named_parameters())
    assert len(engine.training_engine.units) > 5
    for batch in token_batches(2):
        engine.backward(engine(*batch))
        engine.step()
        now = {name: parameter.detach().clone() for name, parameter in held.items()}
        for name, value in engine.training_engine.stream_state_dict():
            assert torch.equal(now[name], value), name


def test_its_weights_are_streamed(opens: Opens) -> None:
    """`infinity.stream_weights` takes this engine as well as Infinity's own."""
    engine = opens(3)
    expected = engine.training_engine.state_dict()
    values = dict(infinity.stream_weights(engine))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_an_fp16_overflow_is_shown_as_a_skipped_step(opens: Opens, tmp_path: Path) -> None:
    """The optimizer's `overflow` and `cur_scale`, which Accelerate reads, follow the loss scale.

    So they do if a script calls `optimizer.step()`, and after a checkpoint was loaded.
    """
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    engine = opens(fp16=fp16)
    optimizer, [batch] = engine.optimizer, token_batches(1)
    scaler = optimizer.loss_scaler
    assert (optimizer.overflow, optimizer.cur_scale, optimizer.loss_scale) == (False, 2.0**32, 2.0**32)
    assert optimizer.needs_scaler() and optimizer.dynamic_loss_scale and scaler.dynamic
    engine.save_checkpoint(tmp_path)
    run(engine, [batch])
    assert (optimizer.overflow, engine.was_step_applied(), engine.skipped_steps) == (True, False, 1)
    assert optimizer.cur_scale == scaler.cur_scale == scaler.loss_scale == 2.0**31
    engine.backward(engine(*batch))
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 2.0**30)
    engine.load_checkpoint(tmp_path)
    assert (optimizer.overflow, optimizer.loss_scale) == (False, 2.0**32)
    for change in (lambda: setattr(optimizer, "cur_scale", 8.0), lambda: optimizer.override_loss_scale(8.0)):
        with pytest.raises(UsageError, match="the engine owns the loss scale"):
            change()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.dynamic_loss_scale_args()["init_scale"] == 2.0**32
    assert engine.get_data_types()[0] == torch.float16


def test_without_fp16_the_optimizer_has_no_loss_scale(opens: Opens) -> None:
    """The names are there in fp32 and bf16, with the values of DeepSpeed's optimizers."""
    for section in ({}, {"bf16": {"enabled": True}}):
        optimizer = opens(**section).optimizer
        assert (optimizer.overflow, optimizer.cur_scale, optimizer.loss_scaler.cur_scale) == (False, 1.0, 1.0)
        assert not (optimizer.dynamic_loss_scale or optimizer.needs_scaler() or optimizer.custom_loss_scaler)
    assert opens(fp16={"enabled": True, "loss_scale": 8}).optimizer.needs_scaler()


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_autocast_equals_a_context_around_the_model(opens: Opens, stage: int) -> None:
    """fp32 parameters train under the section's autocast, and the engine's names report it."""
    batches = token_batches(3)
    section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    engine = opens(stage, torch_autocast=section)
    losses = run(engine, batches)
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.bfloat16
    assert engine.torch_autocast_lower_precision_safe_modules() == ["torch.nn.Linear"]
    assert engine.get_data_types()[0] == torch.float32 and not engine.optimizer.needs_scaler()
    other = opens(stage)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(other, batches) == losses
    states = engine.module_state_dict()
    assert all(torch.equal(value, states[name]) for name, value in other.module_state_dict().items())
    assert (other.torch_autocast_enabled(), other.torch_autocast_dtype()) == (False, None)
    assert other.torch_autocast_lower_precision_safe_modules()[0] == "torch.nn.modules.linear.Linear"
    assert run(opens(stage), batches) != losses


def test_the_scale_of_float16_autocast_is_grad_scalers(opens: Opens) -> None:
    """It starts at 2^16 and is halved by each overflow, whatever section fp16 says."""
    [batch] = token_batches(1)
    autocast = {"enabled": True, "dtype": "fp16"}
    engine = opens(torch_autocast=autocast, fp16={"enabled": False, "initial_scale_power": 4, "hysteresis": 3})
    assert engine.optimizer.needs_scaler() and engine.optimizer.cur_scale == 2.0**16
    engine.backward(engine(*batch) * 1e4)
    engine.step()
    assert (engine.optimizer.overflow, engine.optimizer.cur_scale) == (True, 2.0**15)
    assert engine.training_engine.loss_scale.good == 0  # in section fp16, DeepSpeed's first windows are longer


def test_fp16_auto_cast_as_accelerate_sets_it(opens: Opens) -> None:
    """Float inputs are cast, for the engine and for a direct call of its module, as by DeepSpeed's hook."""
    [(x, y)] = vector_batches(1)
    engine = opens(model=seeded(Linears), fp16={"enabled": True, "auto_cast": True})
    assert engine.fp16_auto_cast()
    loss = engine(x, y)
    assert torch.equal(loss, engine.module(x.half(), y.half()))
    with torch.no_grad():
        assert torch.equal(engine.module(x, y), loss)


def test_an_engine_without_an_optimizer_keeps_the_configs_precision(opens: Opens) -> None:
    """A reference model runs under the same autocast as the trained one."""
    [batch] = token_batches(1)
    autocast = {"enabled": True, "dtype": "bf16"}
    trained, reference = opens(torch_autocast=autocast), opens(torch_autocast=autocast, optimizer=None)
    assert torch.equal(trained(*batch), reference(*batch))


def test_the_fp16_scale_doubles_as_deepspeeds(opens: Opens) -> None:
    """Three good steps double a scale of window 2 at first, and after that two do."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    engine = opens(fp16=fp16)
    scales = []
    for batch in token_batches(6):
        run(engine, [batch])
        scales.append(engine.optimizer.cur_scale)
    assert scales == [16, 16, 32, 32, 64, 64]


def test_a_gradient_set_by_hand_is_refused(opens: Opens) -> None:
    """A value put into `.grad` raises, since the engine would not use it."""
    engine = opens()
    weight = engine.module.head.weight
    with pytest.raises(UsageError, match=r"head\.weight\.grad was set by hand"):
        weight.grad = torch.ones_like(weight)


def test_without_an_optimizer_the_engine_runs_the_model(opens: Opens) -> None:
    """A reference model in stage 3 gives the model's outputs; backward and step raise."""
    model, [batch] = seeded(Stack), token_batches(1)
    model.eval()
    expected = model(*batch)
    engine = opens(3, model=model, optimizer=None)
    assert engine.lr_scheduler is None and engine.get_lr() == engine.get_mom() == []
    assert (
        isinstance(engine.optimizer, deepspeed.zero.DeepSpeedZeRoOffload) and opens(0, optimizer=None).optimizer is None
    )
    assert not engine.module.training
    torch.testing.assert_close(engine(*batch), expected)
    with pytest.raises(UsageError, match="the engine has no optimizer"):
        engine.backward(engine(*batch))


@pytest.mark.parametrize("trains", [True, False])
def test_hooks_are_removed_for_a_generation_as_trl_does(opens: Opens, trains: bool) -> None:
    """An engine without and with an optimizer: its steps before and after equal those of a plain loop."""
    batches = token_batches(4)
    engine = opens(3) if trains else opens(3, optimizer=None)
    if trains:
        run(engine, batches[:2])
    owner = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        named = list(owner.module.named_parameters(recurse=True)) + list(owner.module.ds_external_parameters())
        assert [name for name, _ in named] == [name for name, _ in engine.module.named_parameters()]
        for _, parameter in named:
            parameter.ds_active_sub_modules.clear()
        for hook in (*owner.forward_hooks, *owner.backward_hooks):
            hook.remove()
        owner.forward_hooks, owner.backward_hooks = [], []
        engine(*batches[3])
        owner._register_deepspeed_module(owner.module)
    if trains:
        run(engine, batches[2:])
        same(engine, plain(batches))


def test_a_retained_graph_is_differentiated_again(opens: Opens) -> None:
    """Two backwards of one loss add its gradients twice."""
    [batch] = token_batches(1)
    engine = opens(gradient_accumulation_steps=2, gradient_clipping=0.0)
    loss = engine(*batch)
    engine.backward(loss, retain_graph=True)
    engine.step()
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
    same(engine, plain([batch], clip=0.0))


# -- memory between phases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_states_are_offloaded_between_phases(opens: Opens, stage: int) -> None:
    """Training continues with the same bits, the model is refused meanwhile, and other devices raise."""
    batches = token_batches(4)
    reference = opens(stage)
    expected = run(reference, batches)
    engine = opens(stage)
    losses = run(engine, batches[:2])
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False, non_blocking=True)
    with pytest.raises(UsageError, match=r"call engine\.reload_states\(\) before"):
        engine(*batches[2])
    engine.reload_states(non_blocking=True)
    losses += run(engine, batches[2:3])
    engine.offload_states(device=OffloadDeviceEnum.none)
    assert losses + run(engine, batches[3:]) == expected
    with pytest.raises(UsageError, match=r"offload_states\(device='nvme'\)"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


# -- the module --------------------------------------------------------------------------------------------------------


def test_the_engine_is_a_module_around_the_model(opens: Opens) -> None:
    """Parameters and states have DeepSpeed's prefix; attributes of the model are found; train and eval reach it."""
    model = seeded(Stack)
    model.answer = 42  # type: ignore[assignment]
    engine = opens(model=model)
    assert isinstance(engine, nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name in names]
    assert list(engine.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert list(engine.module_state_dict()) == list(model.state_dict())
    assert engine.module is model and engine.answer == 42
    assert len(list(engine.parameters())) == len(names)
    assert next(iter(engine.modules())) is engine
    engine.eval()
    assert not engine.training and not model.training
    assert engine.train() is engine and model.training
    with pytest.raises(AttributeError, match="'DeepSpeedEngine' object has no attribute 'nothing'"):
        engine.nothing  # noqa: B018


def test_conversions_without_effect_are_accepted_and_others_refused(opens: Opens) -> None:
    """`.to` of the engine's own device and dtype returns it; others raise with the reason."""
    engine = opens()
    assert engine.to(engine.device) is engine
    assert engine.to(engine.device, torch.float32).float() is engine
    for convert in (
        engine.half,
        engine.bfloat16,
        engine.double,
        lambda: engine.to("meta"),
        lambda: engine.to("cuda:7"),
    ):
        with pytest.raises(UsageError, match=r"engine\.to\("):
            convert()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(engine)


def test_a_destroyed_engines_model_goes_to_another_engine(opens: Opens) -> None:
    """`destroy` returns the values, and a second engine continues from them."""
    batches = token_batches(2)
    first = opens(3)
    run(first, batches)
    values = first.module_state_dict()
    first.destroy()
    first.destroy()
    second = opens(2, model=first.module)
    for name, value in second.module_state_dict().items():
        assert torch.equal(value, values[name])
    run(second, batches)


@pytest.mark.parametrize("given", [{}, {"optimizer": None}], ids=["trained", "only run"])
def test_a_second_engine_takes_the_model_from_the_first(opens: Opens, given: dict[str, Any], tmp_path: Path) -> None:
    """`initialize` closes the engine of its model, wherever the values are; Lightning tests so after a fit."""
    batches = token_batches(4)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    model = seeded(Stack)
    model.blocks[0].requires_grad_(False)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    first = opens(3, model=model, zero_optimization={"offload_param": nvme}, **given)
    expected = first(*batches[0])
    if not given:
        run(first, batches[:2])
        expected = first(*batches[0])
    second = opens(3, model=model)
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert torch.equal(second(*batches[0]), expected)
    with pytest.raises(UsageError, match="the engine is closed"):
        first(*batches[0])
    run(second, batches[2:])


def test_moves_of_the_model_leave_parameters_where_they_are(opens: Opens) -> None:
    """As DeepSpeed in stage 3: a trainer may move the model to the CPU, and buffers follow. Conversions are refused."""
    batches = token_batches(4)
    model = seeded(Stack)
    model.register_buffer("seen", torch.zeros(2))
    engine = opens(3, model=model)
    run(engine, batches[:2])
    assert engine.module.to("meta").head.weight.device == engine.device and model.seen.is_meta
    with pytest.raises(UsageError, match=r"was to be moved to torch\.float16"):
        engine.module.half()
    run(engine, batches[2:])
    same(engine, plain(batches))


# -- values and checkpoints --------------------------------------------------------------------------------------------


def test_checkpoints_have_deepspeeds_returns(opens: Opens, tmp_path: Path) -> None:
    """`save` returns True under global_stepN, `load` the path and client_state; without `latest`, (None, None)."""
    batches = token_batches(4)
    engine = opens(3)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    run(engine, batches[:2])
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3}) is True
    assert (tmp_path / "global_step2").is_dir()
    expected = run(engine, batches[2:])
    engine.destroy()
    again = opens(2)
    path, client_state = again.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "global_step2") and client_state == {"epoch": 3}
    assert (again.global_steps, again.global_samples) == (2, 8)
    assert run(again, batches[2:]) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(UsageError, match="custom_load_fn"):
        again.load_checkpoint(str(tmp_path), custom_load_fn=print)


@pytest.mark.parametrize(("stage", "device"), [(2, "none"), (3, "nvme")])
def test_custom_load_fn_gets_the_states_and_the_model(opens: Opens, stage: int, device: str, tmp_path: Path) -> None:
    """A function that edits parameters and one that calls `load_state_dict` load what the engine loads itself."""
    batches, states = token_batches(3), seeded(Stack, 1).state_dict()

    def renamed(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name.removeprefix("old."): value for name, value in src.items()})

    def copied(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in dst.named_parameters():
                parameter.copy_(src["old." + name])

    offload = {"device": device, "nvme_path": str(tmp_path)}
    zero = {"offload_param": offload, "offload_optimizer": offload} if stage == 3 else {}
    found = []
    for custom in (None, renamed, copied):
        engine = opens(stage, zero_optimization=zero, infinity={"unit_size": 20_000, "cache_bytes": 0})
        run(engine, batches[:1])
        prefix = "old." if custom else ""
        content = {"module": {prefix + name: value for name, value in states.items()}}
        engine.load_module_state_dict(content, custom_load_fn=custom)
        found.append((run(engine, batches[1:]), engine.module_state_dict()))
        with pytest.raises(UsageError, match=r"load_state_dict\(\) was called"):
            engine.module.load_state_dict(states)
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())


def test_latest_names_the_last_save_that_may_be_continued(opens: Opens, tmp_path: Path) -> None:
    """`save_latest=False` leaves the file `latest` as it is."""
    engine = opens(2)
    engine.save_checkpoint(tmp_path, "first")
    engine.save_checkpoint(tmp_path, "aside", save_latest=False)
    assert (tmp_path / "aside").is_dir()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "first")


def test_parts_of_a_checkpoint_are_loaded(opens: Opens, tmp_path: Path) -> None:
    """Counts, moments and rates are those of the checkpoint or of the new run, as the arguments say."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = opens(2, scheduler=schedule)
    run(engine, token_batches(3))
    engine.save_checkpoint(tmp_path)
    weights = engine.module_state_dict()

    def loaded(**asked: bool) -> tuple[int, int, bool, int]:
        new = opens(2, scheduler=schedule)
        new.load_checkpoint(tmp_path, **asked)
        assert all(torch.equal(value, weights[name]) for name, value in new.module_state_dict().items())
        moment = deepspeed.utils.safe_get_full_optimizer_state(new.module.head.weight, "exp_avg")
        rates = new.lr_scheduler.last_batch_iteration
        found = new.global_steps, new.global_samples, bool(moment.any()), rates
        new.destroy()
        return found

    assert loaded() == (3, 12, True, 2)
    assert loaded(load_optimizer_states=False) == (3, 12, False, 2)
    assert loaded(load_lr_scheduler_states=False) == (3, 12, True, -1)
    assert loaded(load_module_only=True) == (0, 0, False, -1)


def test_a_checkpoint_without_the_frozen_base_is_loaded_into_a_model_with_it(opens: Opens, tmp_path: Path) -> None:
    """`exclude_frozen_parameters` saves the trained ones, which load_module_strict=False loads."""

    def model() -> Stack:
        built = seeded(Stack)
        built.embedding.weight.requires_grad_(False)
        return built

    engine = opens(2, model=model())
    run(engine, token_batches(2))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    weights = engine.module_state_dict()
    engine.destroy()
    again = opens(2, model=model())
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        again.load_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path, load_module_strict=False)
    assert all(torch.equal(value, weights[name]) for name, value in again.module_state_dict().items())


def test_weights_are_saved_in_the_models_dtype(opens: Opens, tmp_path: Path) -> None:
    """`save_16bit_model` writes what a plain model loads; in stage 3 only if the config gathers, as in DeepSpeed."""
    engine = opens(3, bf16={"enabled": True})
    assert engine.save_16bit_model(tmp_path) is False
    assert list(tmp_path.iterdir()) == []
    engine.destroy()
    engine = opens(2, bf16={"enabled": True})
    assert engine.save_16bit_model(tmp_path, "weights.bin") is True
    weights = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    seeded(Stack).to(torch.bfloat16).load_state_dict(weights)
    engine.destroy()
    engine = opens(0, optimizer=None)
    assert engine.save_16bit_model(tmp_path, "run.bin") is True
    assert len(torch.load(tmp_path / "run.bin", weights_only=True)) == len(weights)


def test_a_state_dict_is_loaded_into_parameters_and_masters(opens: Opens) -> None:
    """`load_module_state_dict` replaces values that updates start from; other names raise before any change."""
    engine = opens(3, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    before = engine.module_state_dict()
    values = {name: torch.randn_like(value) for name, value in before.items()}
    with pytest.raises(UsageError, match=r"missing: head\.weight; unexpected: other"):
        engine.load_module_state_dict(
            {"module": {**{n: v for n, v in values.items() if n != "head.weight"}, "other": 1}}
        )
    assert all(torch.equal(before[name], value) for name, value in engine.module_state_dict().items())
    engine.load_module_state_dict({"module": values})
    run(engine, token_batches(1))
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, values[name])


def test_frozen_parameters_are_left_out_on_request(opens: Opens) -> None:
    """`exclude_frozen_parameters` drops parameters that do not require gradients."""
    model = seeded(Stack)
    model.embedding.weight.requires_grad_(False)
    engine = opens(model=model)
    assert "embedding.weight" in engine.module_state_dict()
    left = set(engine.module_state_dict()) - set(engine.module_state_dict(exclude_frozen_parameters=True))
    assert left == {"embedding.weight"}
    assert "embedding.weight" not in engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)


def test_weights_that_memory_does_not_hold_are_refused_as_trainer_expects(
    opens: Opens, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers saves a checkpoint after a ValueError. Gathered and written, the weights take memory twice."""
    engine = opens()
    nbytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    monkeypatch.setattr("infinity.deepspeed.states.available_memory", lambda: 2 * nbytes - 1)
    with pytest.raises(ValueError, match=rf"{2 * nbytes:,} bytes are needed, .* 1 are missing"):
        engine._zero3_consolidated_16bit_state_dict()
    for text in (
        "`infinity export FOLDER OUT`",
        "given to save_model",
        "gives stage3_gather_16bit_weights_on_model_save as",
    ):
        assert text in caplog.text
    with pytest.raises(ValueError, match="bytes are needed"):  # a Trainer's next save
        engine._zero3_consolidated_16bit_state_dict()
    assert caplog.text.count("are not gathered") == 1
    monkeypatch.setattr("infinity.deepspeed.states.available_memory", lambda: 2 * nbytes)
    assert len(engine._zero3_consolidated_16bit_state_dict()) == len(engine.module_state_dict())


# -- data --------------------------------------------------------------------------------------------------------------


def test_the_loader_draws_micro_batches_with_the_last_smaller_one(opens: Opens) -> None:
    """`training_data` gives shuffled batches of every sample once; `collate_fn` makes them."""
    data = TensorDataset(torch.arange(10))
    engine = opens(given={"training_data": data, "collate_fn": lambda rows: torch.stack([row[0] for row in rows])})
    batches = list(engine.training_dataloader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(torch.cat(batches).tolist()) == list(range(10))
    ordered = engine.deepspeed_io(data, batch_size=5, route="eval")
    assert torch.cat(list(ordered)).tolist() == list(range(10))


def test_vectors_train(opens: Opens) -> None:
    """A model of one unit trains too."""
    engine = opens(model=seeded(lambda: nn.Linear(32, 32)), infinity={})
    for x, y in vector_batches(2):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    assert engine.global_steps == 2


def test_the_cache_of_partitions_is_emptied(opens: Opens) -> None:
    """No unit stays in memory."""
    engine = opens(3)
    run(engine, token_batches(1))
    units = engine.training_engine.units
    assert any(unit.lease is not None for unit in units)
    engine.empty_partition_cache()
    assert all(unit.lease is None for unit in units)

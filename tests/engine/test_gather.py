"""Gathered parameters, gradients and states: reads equal those of a plain loop, and edits take effect."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import OutOfMemoryError, UsageError
from infinity.plan.pools import UNITS
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(6)
LATER = {"update": "next_forward", "unit_size": 2048}


def engine_of(seed: int = 0, device: Any = None, tied: bool = True, **options: Any) -> TrainingEngine:
    return open_engine(seeded(lambda: Stack(depth=4, tied=tied), seed), engine_config(**options), device)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_masters_and_moments(bf16: bool, late: bool) -> None:
    with engine_of(bf16=bf16, device=LateDevice() if late else None) as engine:
        train(engine, BATCHES[:2])
        expected = states_of(engine)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(infinity.get_full_fp32_param(parameter), expected[f"{name}/master"])
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(infinity.get_full_optimizer_state(parameter, moment), expected[f"{name}/{moment}"])


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_what_is_set_is_read_and_trained_on(bf16: bool, moments: str, tmp_path: Path) -> None:
    """States of one engine are set in another by name, and both continue alike; 8-bit moments are encoded again."""
    options: dict[str, Any] = {"bf16": bf16, "unit_size": 2048}
    with engine_of(**options, moments="fp32") as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path)
        values: dict[str, list[torch.Tensor]] = {}
        for name, parameter in engine.module.named_parameters():
            values[name] = [infinity.get_full_fp32_param(parameter)]
            values[name] += [infinity.get_full_optimizer_state(parameter, m) for m in ("exp_avg", "exp_avg_sq")]
        expected = train(engine, BATCHES[3:])
    with engine_of(7, **options, moments=moments) as engine:
        train(engine, BATCHES[:3])  # counts the same steps
        for name, parameter in engine.module.named_parameters():
            infinity.set_full_fp32_param(parameter, values[name][0])
            infinity.set_full_optimizer_state(parameter, "exp_avg", values[name][1])
            before = infinity.get_full_optimizer_state(parameter, "exp_avg")
            infinity.set_full_optimizer_state(parameter, "exp_avg_sq", values[name][2])
            assert torch.equal(infinity.get_full_optimizer_state(parameter, "exp_avg"), before)
            assert torch.equal(infinity.get_full_fp32_param(parameter), values[name][0])
        found = train(engine, BATCHES[3:])
        assert found == expected if moments == "fp32" else found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("fp16", [None, {"loss_scale": 256}], ids=["fp32", "fp16"])
def test_gradients(accumulation: int, fp16: Any, tmp_path: Path) -> None:
    """Gradients are those of a plain backward; after set_full_grad, the step uses the new ones."""
    model = seeded(lambda: Stack(depth=4, tied=True))
    for batch in BATCHES[:accumulation]:
        (model(*batch) / accumulation).backward()
    with engine_of(accumulation=accumulation, fp16=fp16, clip=1e9, **LATER) as engine:
        for batch in BATCHES[:accumulation]:
            engine.backward(engine(*batch))
        for name, parameter in engine.module.named_parameters():
            plain = dict(model.named_parameters())[name].grad
            assert plain is not None
            found = infinity.get_full_grad(parameter)
            assert found is not None and found.dtype == torch.float32
            close = {"rtol": 2e-2, "atol": 1e-3} if fp16 else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(found, plain, **close)
            infinity.set_full_grad(parameter, torch.full_like(plain, 0.5))
            assert torch.equal(infinity.get_full_grad(parameter), torch.full_like(plain, 0.5))  # type: ignore[arg-type]
        engine.step()
        count = sum(p.numel() for p in engine.module.parameters())
        assert engine.get_global_grad_norm() == pytest.approx(0.5 * count**0.5, rel=1e-6)
        for parameter in engine.module.parameters():
            average = infinity.get_full_optimizer_state(parameter, "exp_avg")
            torch.testing.assert_close(average, torch.full_like(average, 0.05))


def test_gradients_that_are_not_there() -> None:
    with engine_of(**LATER) as engine:
        weight = engine.module.embedding.weight
        assert infinity.get_full_grad(weight) is None
        with pytest.raises(UsageError, match="has no gradient in this step"):
            infinity.set_full_grad(weight, torch.zeros(weight.shape))
        train(engine, BATCHES[:1])
        assert infinity.get_full_grad(weight) is None
    with engine_of(accumulation=2, stage=1, param="none", **LATER) as engine:
        engine.backward(engine(*BATCHES[0]))
        with pytest.raises(UsageError, match=r"after a step.s last micro-batch"):
            infinity.get_full_grad(engine.module.embedding.weight)
    with engine_of() as engine:  # updated during backward, from the second step on
        train(engine, BATCHES[:2])
        engine.backward(engine(*BATCHES[2]))
        with pytest.raises(UsageError, match=r'infinity\.update to "next_forward"'):
            infinity.get_full_grad(engine.module.blocks[1].up.weight)
        engine.step()


@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_gathered_parameters_are_kept_and_their_changes_too(bf16: bool, modifier_rank: int | None) -> None:
    with engine_of(bf16=bf16, prefetch_bytes=0) as engine:
        train(engine, BATCHES[:2])
        blocks = engine.module.blocks
        with infinity.GatheredParameters(blocks[0].parameters(), modifier_rank), torch.no_grad():
            weight = blocks[0].up.weight
            _ = blocks[3].up.weight, blocks[2].up.weight, engine.module.embedding.weight  # take other buffers
            weight.fill_(0.25)
            blocks[0].up.bias.data = torch.ones_like(blocks[0].up.bias)
        train(engine, BATCHES[2:3])
        master = infinity.get_full_fp32_param(weight)
        assert master.sub(0.25).abs().max() < 0.01 and master.ne(0.25).any()
        assert infinity.get_full_fp32_param(blocks[0].up.bias).sub(1).abs().max() < 0.01


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_a_step_inside_of_gathered_parameters_is_that_of_a_plain_loop(param: str, update: str, late: bool) -> None:
    """The end of a block sends the updated parameters to other ranks, from whatever state the update left them in."""
    results = []
    for gathers in (False, True):
        device = LateDevice() if late else None
        with engine_of(param=param, optim="cpu", unit_size=8192, update=update, device=device) as engine:
            train(engine, BATCHES[:3])
            for number, batch in enumerate(BATCHES[3:]):
                block = engine.module.blocks[number]
                with infinity.GatheredParameters([block.up.weight] if gathers else [], modifier_rank=0):
                    train(engine, [batch])
            results.append(parameters_of(engine))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


# -- more units than buffers -------------------------------------------------------------------------------------------

MANY: dict[str, Any] = {"unit_size": 2048, "prefetch_bytes": 0}


def many(device: Any = None, **options: Any) -> TrainingEngine:
    engine = open_engine(seeded(lambda: Stack(depth=12)), engine_config(**MANY | options), device)
    assert len(engine.units) == 38
    return engine


def held_bytes(engine: TrainingEngine) -> int:
    return engine.parts.pools[UNITS].nbytes


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(("modifier_rank", "bf16"), [(None, True), (0, False)])
def test_a_whole_model_is_gathered(param: str, modifier_rank: int | None, bf16: bool, late: bool) -> None:
    """Units stay where they are while others are read and used, and edits take effect bit for bit."""
    edited, device = [], LateDevice() if late else None
    with many(device, param=param, bf16=bf16, update="next_forward") as engine:
        train(engine, BATCHES[:2])
        expected, planned = parameters_of(engine), held_bytes(engine)
        with infinity.GatheredParameters(engine.module.parameters(), modifier_rank), torch.no_grad():
            engine(*BATCHES[2])
            addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(parameter, expected[name])
                parameter.mul_(0.5)
            engine(*BATCHES[2])
            assert [parameter.data_ptr() for parameter in engine.module.parameters()] == addresses
            edited = [parameter.clone() for parameter in engine.module.parameters()]
        assert held_bytes(engine) == planned and not any(unit.pin_count for unit in engine.units)
        for parameter, value in zip(engine.module.parameters(), edited, strict=True):
            assert torch.equal(parameter, value)
            assert torch.equal(infinity.get_full_fp32_param(parameter), value.float())
        train(engine, BATCHES[2:])


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
def test_steps_inside_of_a_gathered_model_are_those_of_a_plain_loop(update: str, late: bool) -> None:
    """Views of parameters are alive meanwhile, whose buffers an update leaves to them."""
    results = []
    for gathers in (False, True):
        with many(LateDevice() if late else None, update=update) as engine:
            train(engine, BATCHES[:2])
            planned = held_bytes(engine)
            with infinity.GatheredParameters(engine.module.parameters() if gathers else [], modifier_rank=0):
                views = [engine.module.blocks[n].up.weight[0] for n in (0, 5, 11)] if gathers else []
                train(engine, BATCHES[2:4])
                del views
            train(engine, BATCHES[4:])
            assert held_bytes(engine) == planned
            results.append(parameters_of(engine))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_the_cost_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with many() as engine, caplog.at_level(logging.WARNING, "infinity"):
        planned = held_bytes(engine)
        for _ in range(2):
            with infinity.GatheredParameters(engine.module.parameters()):
                cost = held_bytes(engine) - planned
                with infinity.GatheredParameters(engine.module.parameters()):  # which holds them already
                    assert held_bytes(engine) == planned + cost
        with infinity.GatheredParameters(engine.module.blocks[0].parameters()):
            pass
    lines = [record.message for record in caplog.records if "GatheredParameters" in record.message]
    assert len(lines) == 1 and cost > 0
    assert "holds 38 units at once" in lines[0] and f" {cost:,} bytes on each rank" in lines[0]
    assert "infinity.stream_weights(engine)" in lines[0]


@pytest.mark.parametrize("limit", [None, "device", "host"])
def test_missing_memory_is_named(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is made, and the engine continues."""
    memory = {limit: 400_000 if limit == "device" else 700_000} if limit else {}
    with many(memory=memory) as engine:
        planned = held_bytes(engine)
        needed = r"[\d,]+ bytes are needed, [\d,]+ are available, [\d,]+ are missing; gather fewer"
        where = rf"{limit} memory \(infinity\.memory\.{limit}\)" if limit else "host memory"
        with monkeypatch.context() as patch:
            if limit is None:
                patch.setenv("INFINITY_MACHINE_MEMORY", "1MiB")
            gathered = infinity.GatheredParameters(engine.module.parameters())
            with pytest.raises(OutOfMemoryError, match=f"too little {where} for .*: {needed}"), gathered:
                pass
        assert held_bytes(engine) == planned and not any(unit.pin_count for unit in engine.units)
        train(engine, BATCHES[:1])


def test_a_block_that_fails_lets_go() -> None:
    with engine_of(prefetch_bytes=0) as engine:
        with pytest.raises(KeyError), infinity.GatheredParameters(engine.module.embedding.weight, 0):
            raise KeyError
        assert not any(unit.pin_count for unit in engine.units)
        train(engine, BATCHES[:1])


def test_the_state_dict_is_the_models(tmp_path: Path) -> None:
    with engine_of(bf16=True, tied=True) as engine:
        train(engine, BATCHES[:2])
        found = engine.state_dict()
        expected = parameters_of(engine)
    fresh = Stack(depth=4, tied=True).to(torch.bfloat16)
    fresh.load_state_dict(found)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in fresh.named_parameters())
    assert found.keys() == fresh.state_dict().keys()


def test_what_cannot_be_accessed() -> None:
    with engine_of() as engine:
        weight = engine.module.embedding.weight
        stranger = nn.Parameter(torch.zeros(2))
        with pytest.raises(UsageError, match="no parameter of an open engine"):
            infinity.get_full_fp32_param(stranger)
        with infinity.GatheredParameters([stranger]):
            pass
        with pytest.raises(UsageError, match=r"no state 'momentum_buffer': the optimizer keeps exp_avg, exp_avg_sq"):
            infinity.get_full_optimizer_state(weight, "momentum_buffer")
        with pytest.raises(UsageError, match=r"embedding.weight has shape .*, the value \[3\]"):
            infinity.set_full_fp32_param(weight, torch.zeros(3))
        with pytest.raises(UsageError, match="pass a rank from 0 to 0"):
            infinity.GatheredParameters([weight], modifier_rank=1)
    with pytest.raises(UsageError, match="no parameter of an open engine"):
        infinity.get_full_fp32_param(weight)

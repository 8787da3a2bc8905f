"""A frozen base in 8 bits or NF4 (`infinity.frozen`) trains as a model that has the rounded values, bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ModelError, UsageError
from infinity.nn import TiledLinear
from infinity.optim.frozen import frozen_values
from infinity.plan.frozen import FrozenFormat
from infinity.tiers.device import CpuDevice
from support.configs import DEVICES, engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, plain, plain_bf16, train
from support.models import Stack, adapted, seeded, token_batches

STEPS = 4


def rounded(model: nn.Module, format: FrozenFormat, dtype: torch.dtype) -> nn.Module:
    """Give the frozen matrices of `model` the values with which the engine computes."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = frozen_values(parameter.data.to(dtype), format).to(parameter.dtype)
    return model


def run(model: nn.Module, *, late: bool = False, **options: Any) -> Result:
    device = LateDevice(delay=0.01) if late else CpuDevice()
    with open_engine(model, engine_config(**options), device) as engine:
        return Result(train(engine, token_batches(STEPS)), parameters_of(engine), len(engine.parts.units))


@pytest.mark.pairwise
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("param", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("format", ["8bit", "nf4"])
def test_the_result_is_that_of_the_rounded_model(
    format: FrozenFormat, dtype: str, param: str, stage: int, late: bool, tmp_path: Path
) -> None:
    """On every tier and stage, where the host computes and on a device with its own memory."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    options: dict[str, Any] = {"bf16": dtype == "bf16", "fp16": {"loss_scale": 64.0} if dtype == "fp16" else None}
    model = rounded(seeded(adapted), format, dtypes[dtype])
    expected = run(model, param="none", optim="none", **options)
    options |= {"param": param if stage == 3 else "none", "optim": param, "stage": stage, "folder": tmp_path}
    assert_same(run(seeded(adapted), late=late, frozen=format, **options), expected)


@pytest.mark.parametrize("format", ["8bit", "nf4"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_plain_loop_agrees(format: FrozenFormat, bf16: bool, tmp_path: Path) -> None:
    """The first loss has its bits; later ones differ by the rounding of Adam only."""
    config = engine_config("nvme", "nvme", folder=tmp_path, bf16=bf16, frozen=format)
    loop = plain_bf16 if bf16 else plain
    expected = loop(
        rounded(seeded(adapted), format, torch.bfloat16 if bf16 else torch.float32), token_batches(STEPS), config
    )
    found = run(seeded(adapted), param="nvme", optim="nvme", folder=tmp_path, bf16=bf16, frozen=format)
    assert found.losses[0] == expected.losses[0]
    assert_close(found, expected, **({"loss": 1e-2, "parameters": 1e-2} if bf16 else {}))
    plain_loop = loop(seeded(adapted), token_batches(STEPS), config)
    assert found.losses[0] != plain_loop.losses[0], "nothing was rounded"


def moved(format: str, folder: Path) -> tuple[int, int]:
    """Return bytes that a step reads and writes. The blocks are far larger than the adapters, norms and biases."""
    config = engine_config("nvme", "cpu", folder=folder, bf16=True, frozen=format, unit_size="1MiB", prefetch_bytes=0)
    with open_engine(seeded(lambda: adapted(width=256, depth=6)), config) as engine:
        described = engine.describe()
        assert f"bfloat16, frozen in {format}" in described or format == "as_is"
        train(engine, token_batches(2))
        engine.settle()
        before = engine.parts.counters()
        train(engine, token_batches(1))
        engine.settle()
        after = engine.parts.counters()
    one, other = (after[f"nvme_bytes_{name}"] - before[f"nvme_bytes_{name}"] for name in ("read", "written"))
    return one, other


def test_a_step_reads_as_many_bits(tmp_path: Path) -> None:
    """8.25 and 4.25 bits of 16, and it writes the adapters only."""
    (whole, written), *others = (moved(format, tmp_path) for format in ("as_is", "8bit", "nf4"))
    for bits, (read, also_written) in zip((8.25, 4.25), others, strict=True):
        assert bits / 16 <= read / whole < bits / 16 + 0.06
        assert also_written == written


def test_inference_with_a_whole_model_in_a_code(tmp_path: Path) -> None:
    """`init_inference` freezes every parameter; units in a code are never used in place."""
    for format, param in product(("8bit", "nf4"), DEVICES):
        expected = rounded(seeded(Stack).requires_grad_(False), format, torch.float32)  # type: ignore[arg-type]
        config = engine_config(param, "none", folder=tmp_path, frozen=format)
        with infinity.init_inference(seeded(Stack), config, device=CpuDevice()) as engine, torch.no_grad():
            assert all(unit.layout.index not in engine.parts.plan.in_place for unit in engine.units if unit.layout.code)
            assert any(unit.layout.code for unit in engine.units)
            for batch in token_batches(3):
                assert torch.equal(engine(*batch), expected(*batch))


@pytest.mark.parametrize("format", ["8bit", "nf4"])
def test_edits_are_stored_exactly_or_refused(format: FrozenFormat, tmp_path: Path) -> None:
    """Values of the code stay, through each way of an edit; others are an error that names the parameter."""
    name = "blocks.1.up.base.weight"
    for number, param in enumerate(DEVICES):
        model = seeded(adapted)
        parameter = dict(model.named_parameters())[name]
        wanted = frozen_values(torch.randn(parameter.shape), format)
        with open_engine(model, engine_config(param, "cpu", folder=tmp_path, frozen=format)) as engine:
            with infinity.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(wanted)
            train(engine, token_batches(1))
            assert torch.equal(parameters_of(engine)[name], wanted)
            with pytest.raises(UsageError, match=f'{name} is frozen and was edited to .* "{format}" would round to'):
                infinity.set_full_fp32_param(parameter, wanted + 0.01)
            assert torch.equal(infinity.get_full_fp32_param(parameter), wanted)
            infinity.set_full_fp32_param(parameter, torch.zeros_like(wanted))
            train(engine, token_batches(1))
            assert not parameters_of(engine)[name].any()
        engine = open_engine(seeded(adapted), engine_config(param, "cpu", folder=tmp_path, frozen=format))
        parameter = dict(engine.module.named_parameters())[name]
        value = float("nan") if number else 0.3
        if number == 1:  # found when the unit leaves its buffer
            with infinity.GatheredParameters([parameter]):
                parameter.data[0, 0] = value
            with pytest.raises(UsageError, match=f"{name} is frozen and has the value nan"):
                engine.close()
            continue
        with (
            pytest.raises(UsageError, match=f"{name} is frozen"),
            infinity.GatheredParameters([parameter], modifier_rank=0),
        ):
            parameter.data[0, 0] = value
        with pytest.raises(UsageError, match="the engine stopped"):
            train(engine, token_batches(1))
        engine.close()


@pytest.mark.parametrize("trains", [True, False])
def test_an_edit_in_a_buffer_is_refused_before_it_is_used(trains: bool, tmp_path: Path) -> None:
    """Units that stay in their buffers are not written for many steps, in which values beyond the code would count."""
    model = seeded(adapted)
    config = engine_config(folder=tmp_path, frozen="nf4", cache_bytes="1GiB", prefetch_bytes="1GiB")
    batches = token_batches(3)
    with open_engine(model, config) if trains else infinity.init_inference(model, config, device=CpuDevice()) as engine:
        run = partial(train, engine) if trains else lambda some: [engine(*batch) for batch in some]
        run(batches[:1])
        weight = model.blocks[2].down.base.weight
        with torch.no_grad():
            weight.mul_(-1.0)  # NF4 has no such levels
        with pytest.raises(
            UsageError, match=r"blocks\.2\.down\.base\.weight is frozen and was edited to .* would round"
        ):
            run(batches[1:2])


@pytest.mark.parametrize("rank", [None, 0])
def test_a_block_may_run_the_model_with_other_values(rank: int | None, tmp_path: Path) -> None:
    """Values that the code cannot hold, and that are gone at the end of the block."""
    model = seeded(adapted)
    batch = token_batches(1)[0]
    config = engine_config(folder=tmp_path, frozen="nf4", cache_bytes="1GiB", prefetch_bytes="1GiB")
    with infinity.init_inference(model, config, device=CpuDevice()) as engine:
        expected = engine(*batch)
        weight = model.blocks[2].down.base.weight
        with infinity.GatheredParameters([weight], modifier_rank=rank), torch.no_grad():
            kept = weight.clone()
            weight.mul_(0.77)
            assert not torch.equal(engine(*batch), expected)
            weight.copy_(kept)
        assert torch.equal(engine(*batch), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    model = seeded(adapted)
    model.blocks[2].down.base.weight.data[3, 5] = value
    with pytest.raises(ModelError, match=rf"blocks\.2\.down\.base\.weight is frozen and has the value {value}"):
        open_engine(model, engine_config(folder=tmp_path, frozen="8bit"))


def test_tiles_are_rounded_as_the_whole_layer_or_refused(tmp_path: Path) -> None:
    """A tile that cuts a group of elements with one scale would have other values than the untiled layer."""
    whole = nn.Sequential(nn.Linear(24, 96), nn.Linear(96, 24)).requires_grad_(False)
    config = engine_config(folder=tmp_path, frozen="nf4")
    with infinity.init_inference(copy.deepcopy(whole), config, device=CpuDevice()) as engine:
        expected = engine.state_dict()
    for rows, is_cut in ((32, False), (20, True)):
        tiles = copy.deepcopy(whole)
        tiles[0] = TiledLinear.of_linear(tiles[0], [rows] * (96 // rows) + [96 % rows] * (96 % rows > 0))
        if is_cut:
            with pytest.raises(ModelError, match=r"0\.tiles\.0\.weight, a tile of 0\.weight, begins or ends within a"):
                infinity.init_inference(tiles, config, device=CpuDevice())
            continue
        with infinity.init_inference(tiles, config, device=CpuDevice()) as engine:
            found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    chosen = copy.deepcopy(whole)
    assert infinity.nn.tile(chosen, 2048) == ["0", "1"]  # 21 rows of 24 fit; 16 are whole groups
    with infinity.init_inference(chosen, config, device=CpuDevice()) as engine:
        found = engine.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_16_bit_overflow_is_refused_by_name(tmp_path: Path) -> None:
    model = seeded(adapted)
    model.blocks[0].up.base.weight.data[0, 0] = 1e6  # inf in fp16
    with pytest.raises(ModelError, match=r"blocks\.0\.up\.base\.weight is frozen and has the value inf"):
        open_engine(model, engine_config(folder=tmp_path, frozen="nf4", fp16={"loss_scale": 64.0}))


def test_closing_gives_the_model_the_decoded_values(tmp_path: Path) -> None:
    model = seeded(adapted)
    expected = rounded(seeded(adapted), "nf4", torch.float32)
    engine = open_engine(model, engine_config(folder=tmp_path, frozen="nf4"))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in engine.state_dict().items())
    engine.close(restore=True)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())

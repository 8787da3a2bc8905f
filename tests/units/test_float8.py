"""Frozen weights in float8 with scales beside them, as in transformers' FP8Linear: both keep their dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.checkpoint.export import export
from infinity.errors import ModelError
from infinity.tiers.device import CpuDevice
from support.configs import DEVICES, engine_config
from support.loops import open_engine, train
from support.models import Linears, seeded, vector_batches
from support.quantised import Adapted

BATCHES = vector_batches(3)


class Float8Linear(nn.Module):
    """(batch, width) → the same. A weight of two bytes or more counts as not quantised, as in transformers."""

    def __init__(self, weight: torch.Tensor, scale_in_buffer: bool) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 448
        self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        if scale_in_buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.element_size() > 1:
            return nn.functional.linear(x, self.weight)
        return nn.functional.linear(x, (self.weight.float() * self.scale).to(x.dtype))


def model_of(scale_in_buffer: bool = False, dtype: torch.dtype = torch.float32) -> Linears:
    model = Linears()
    model.layers = nn.ModuleList(Adapted() for _ in range(6))
    for layer in model.layers:
        base: Any = layer.base
        layer.base = Float8Linear(base.weight.detach(), scale_in_buffer)
        layer.down.to(dtype), layer.up.to(dtype)  # type: ignore[operator,union-attr]
    return model


@pytest.mark.parametrize("param", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", ["as_is", "nf4"])
@pytest.mark.parametrize("scale_in_buffer", [False, True])
def test_values_and_scales_keep_their_dtypes(
    scale_in_buffer: bool, frozen: str, dtype: torch.dtype, param: str, tmp_path: Path
) -> None:
    """The first loss is that of the plain model, and a checkpoint of one base loads over another one."""
    batch = tuple(each.to(dtype) for each in BATCHES[0])
    expected = seeded(lambda: model_of(scale_in_buffer, dtype))(*batch)
    config = engine_config(
        param, param, folder=tmp_path, bf16=dtype == torch.bfloat16, prefetch_bytes=0, frozen=frozen,
        fp16={"loss_scale": 1.0} if dtype == torch.float16 else None,
    )  # fmt: skip
    with open_engine(seeded(lambda: model_of(scale_in_buffer, dtype)), config) as engine:
        assert torch.equal(engine(*batch), expected)
        assert engine.state_dict()["layers.0.base.weight"].dtype == torch.float8_e4m3fn
        assert engine.state_dict()["layers.0.base.scale"].dtype == torch.float32
        losses = train(engine, [tuple(each.to(dtype) for each in batch) for batch in BATCHES])
        engine.save_checkpoint(tmp_path / "saved")
        after = engine(*batch)
    assert losses[0] == expected.item() and after < expected
    with open_engine(seeded(lambda: model_of(scale_in_buffer, dtype), 1), config) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(engine(*batch), after)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_inference(dtype: torch.dtype | None) -> None:
    batch = tuple(each.to(dtype or torch.float32) for each in BATCHES[0])
    expected = seeded(lambda: model_of(dtype=dtype or torch.float32))(*batch)
    with infinity.init_inference(seeded(model_of), engine_config(), dtype=dtype, device=CpuDevice()) as engine:
        assert torch.equal(engine(*batch), expected)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trained_weight_in_float8_is_refused_by_name(bf16: bool) -> None:
    model = model_of()
    model.layers[0].base.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(
        ModelError, match=r"layers\.0\.base\.weight is float8_e4m3fn and requires a gradient: freeze it"
    ):
        open_engine(model, engine_config(bf16=bf16))


def test_casts_leave_them_alone(tmp_path: Path) -> None:
    """A stream and an export in another dtype cast the other parameters."""
    model = seeded(model_of)
    own = {name: p.dtype for name, p in model.named_parameters() if ".base." in name}
    with open_engine(model, engine_config(folder=tmp_path)) as engine:
        values = dict(infinity.stream_weights(engine, dtype=torch.bfloat16))
        engine.save_checkpoint(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for found in (values, exported):
        assert {name: value.dtype for name, value in found.items()} == {
            name: own.get(name, torch.bfloat16) for name in values
        }

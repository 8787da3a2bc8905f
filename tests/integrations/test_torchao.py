"""torchao's quantised weights are refused by name, and train once they are dequantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="make test-integrations installs it")

import infinity
from infinity.errors import ModelError
from infinity.tiers.device import CpuDevice
from support.configs import raw
from support.lifetime import assert_trains_like_plain
from support.models import Linears, seeded, vector_batches

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank adapter, as in PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def quantised() -> Linears:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = Linears()
    model.layers = nn.ModuleList(Adapted() for _ in range(6))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith(".base"))
    return model


def dequantised() -> Linears:
    model = quantised()
    for layer in model.layers:
        weight: torch.Tensor = layer.base.weight  # type: ignore[assignment,union-attr]
        layer.base.weight = nn.Parameter(weight.dequantize(), requires_grad=False)  # type: ignore[union-attr]
    return model


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = seeded(quantised)
    x, targets = vector_batches(1)[0]
    model(x, targets).backward()  # a plain loop trains the adapters
    said = r"parameter layers\.0\.base\.weight is a torchao\.\S*Int8Tensor, .*\(layers\.0\.base\.weight\.dequantize\(\)"
    for begin in (infinity.initialize, infinity.init_inference):
        with pytest.raises(ModelError, match=said):
            begin(model, raw(tmp_path), device=CpuDevice())


def test_dequantised_weights_train() -> None:
    assert_trains_like_plain(dequantised, vector_batches(4), units=6)

"""Backwards of graphs that save no tensor: only the arrival of a gradient shows that they run."""

from __future__ import annotations

import torch
from torch import nn

from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import seeded


class Sums(nn.Module):
    """The loss is linear in all parameters, and its gradient needs none of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return sum((each.weight.sum() + each.bias.sum() for each in self.layers), scale.sum())


def clear(parameter: torch.Tensor) -> None:
    """Drop a gradient, as an optimizer in backward does after its update."""
    parameter.grad = None


def test_it_counts_as_a_micro_batch() -> None:
    model = seeded(Sums)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open_engine(seeded(Sums), engine_config("cpu", "cpu", lr=1e-3), CpuDevice()) as engine:
        for _ in range(3):
            model(torch.ones(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(torch.ones(1)))
            assert engine.micro_steps == 1
            engine.step()
        found = parameters_of(engine)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach())


def test_it_counts_if_hooks_have_cleared_all_gradients() -> None:
    model = seeded(Sums)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clear)
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    with open_engine(model, engine_config("cpu", "cpu"), CpuDevice()) as engine:
        engine.backward(engine(torch.ones(1)))
        assert engine.micro_steps == 1
        engine.step()
        found = parameters_of(engine)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)

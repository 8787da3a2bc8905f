"""Code of the ranks in test_meta.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity.construction.materialize
from infinity.construction.initialize import apply_rule
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded, token_batches
from support.states import states_of


def _numpy(model: Stack, module: nn.Module) -> None:
    import numpy as np

    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.from_numpy(np.random.standard_normal(tuple(parameter.shape))))


def _own_generator(model: Stack, module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.normal_(generator=model.generator)  # type: ignore[arg-type]


def _by_rank(model: Stack, module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(0.01 * (1 + (dist.get_rank() if dist.is_initialized() else 0)))


def _counted(model: Stack, module: nn.Module) -> None:
    model.made = getattr(model, "made", 0) + 1  # type: ignore[assignment]
    for parameter in module.parameters(recurse=False):
        parameter.fill_(0.01)
    module.number = model.made


RULES: dict[str, Callable[[Stack, nn.Module], None]] = {
    "numpy": _numpy,
    "own generator": _own_generator,
    "by rank": _by_rank,
    "attributes": _counted,
}


class Ruled(Stack):
    """Has the rule of that name; without one, torch's `reset_parameters` are used."""

    def __init__(self, rule: str, **options: Any) -> None:
        super().__init__(**options)
        self.rule, self.generator = RULES[rule], torch.Generator().manual_seed(1)
        self.apply(self.initialize_module)

    @torch.no_grad()
    def initialize_module(self, module: nn.Module) -> None:
        self.rule(self, module)


def made(
    rank: int, *, folder: str, stage: int = 3, rule: str = "", param: str = "nvme", on_cpu: Collection[int] = ()
) -> dict[str, Any]:
    """Return the initial states of a model on the meta device, with another seed on every rank, and the number of
    parameters that this rank initialised.

    on_cpu: ranks that build the model on the cpu.
    """
    count = 0

    def counting(applied: Any, module: nn.Module, seed: int, others: Collection[str] = ()) -> None:
        nonlocal count
        count += len([name for name, p in module._parameters.items() if p is not None and name not in others])
        apply_rule(applied, module, seed, others)

    def build() -> nn.Module:
        with torch.device("cpu" if rank in on_cpu else "meta"):
            return Ruled(rule, depth=3) if rule else Stack(depth=3, tied=True)

    config = engine_config(param, folder=folder, micro=4, stage=stage, bf16=True, unit_size=100_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infinity.construction.materialize, "apply_rule", counting)
        with open_engine(seeded(build, rank), config) as engine:
            values = states_of(engine) | engine.state_dict()
            for inputs, targets in token_batches(1, batch=4):
                engine.backward(engine(inputs, targets))
                engine.step()
    return {"values": values, "made": count, "all": len(list(engine.module.parameters()))}

"""Code of the ranks in test_dtypes.py: sums of gradients, and those of plain loops with the config's roundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import infinity
from infinity.engine.training import TrainingEngine
from multirank.cases import SAMPLES, Batch, device_of, global_batches, part
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 1024.0
"""Loss scale in fp16."""


@dataclass(frozen=True)
class Sums:
    """Dtypes of gradient sums, as config keys. model: dtype of the parameters."""

    model: str
    communication: str
    accumulated_in: str
    stage: int
    accumulation: int

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `engine_config`."""
        return {
            "bf16": self.model == "bf16",
            "fp16": {"loss_scale": SCALE} if self.model == "fp16" else None,
            "communication": self.communication,
            "accumulated_in": self.accumulated_in,
            "stage": self.stage,
            "accumulation": self.accumulation,
        }


def add(one: torch.Tensor | None, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum, rounded once."""
    return other.to(dtype) if one is None else (one.float() + other.float()).to(dtype)


def plain_gradients(model: nn.Module, batches: list[list[Batch]], sums: Sums) -> dict[str, torch.Tensor]:
    """Return name → summed gradient. batches: by micro-batch and rank."""
    communication, accumulated = DTYPES[sums.communication], DTYPES[sums.accumulated_in]
    factor = (SCALE if sums.model == "fp16" else 1.0) / sums.accumulation

    def backward(batch: Batch) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (model(*batch) * factor).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    each = [[backward(batch) for batch in micro] for micro in batches]
    total: dict[str, torch.Tensor] = {}
    for name in each[0][0]:
        whole: torch.Tensor | None = None
        if sums.stage >= 2 or sums.accumulation == 1:
            for micro in each:
                reduced: torch.Tensor | None = None
                for gradients in micro:
                    reduced = add(reduced, gradients[name].to(communication), communication)
                assert reduced is not None
                whole = reduced if sums.accumulation == 1 else add(whole, reduced, accumulated)
        else:
            for rank in range(len(each[0])):
                mine: torch.Tensor | None = None
                for micro in each:
                    mine = add(mine, micro[rank][name], accumulated)
                assert mine is not None
                whole = add(whole, mine.to(communication), communication)
        assert whole is not None
        total[name] = whole
    return total


def compared(rank: int, *, ranks: int, steps: int, folder: str, sums: Sums, optim: str, late: bool) -> dict[str, Any]:
    """Train beside a plain loop that takes over this one's parameters before every step.

    Returns the gradients that differ in any bit, the norms of both, and how far the masters are apart at the end.
    """
    config = engine_config(
        "none", optim, folder=folder, micro=SAMPLES, clip=1e9, update="next_forward", unit_size=2048, **sums.options
    )
    model = seeded(lambda: Stack(depth=2, tied=True)).to(DTYPES[sums.model])
    masters = {name: p.detach().float() for name, p in seeded(lambda: Stack(depth=2, tied=True)).named_parameters()}
    params = config.optimizer.params
    optimizer = torch.optim.AdamW(masters.values(), params.lr, params.betas, params.eps, params.weight_decay)
    outcome: dict[str, Any] = {"differ": [], "norms": [], "expected": []}
    with open_engine(seeded(lambda: Stack(depth=2, tied=True)), config, device_of(rank, late)) as engine:
        divisor = ranks * engine.loss_scale.value
        for step, batch in enumerate(global_batches(steps, SAMPLES * sums.accumulation * ranks)):
            model.load_state_dict(engine.state_dict())
            cut = [[part(batch, m * ranks + r) for r in range(ranks)] for m in range(sums.accumulation)]
            expected = {name: g.float() / divisor for name, g in plain_gradients(model, cut, sums).items()}
            for micro in cut:
                engine.backward(engine(*micro[rank]))
                if micro is not cut[-1]:
                    engine.step()
            found = gradients_of(engine)
            outcome["differ"] += [f"{step}: {name}" for name, g in found.items() if not torch.equal(g, expected[name])]
            engine.step()
            outcome["norms"].append(engine.get_global_grad_norm())
            outcome["expected"].append(float(sum(g.double().square().sum() for g in expected.values())) ** 0.5)
            for name, master in masters.items():
                master.grad = expected[name]
            optimizer.step()
        apart = total = 0.0
        for name, parameter in engine.module.named_parameters():
            apart += float((infinity.get_full_fp32_param(parameter) - masters[name]).double().square().sum())
            total += float(masters[name].double().square().sum())
        outcome["apart"] = (apart / total) ** 0.5
    return outcome


def gradients_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        gradient = infinity.get_full_grad(parameter)
        assert gradient is not None
        found[name] = gradient
    return found

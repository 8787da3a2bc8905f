"""The model, batches and configs of the DeepSpeed checkpoints in tests/integrations/deepspeed_checkpoints.

Imports torch only, since the script that writes the checkpoints runs without Infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, INNER = 11, 5, 7
STEPS, NEXT_STEPS = 3, 2
"""Steps before the save, and steps after it whose losses are recorded."""
BATCH = 4
LR = 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """(batch, length) tokens and targets → mean cross entropy. No size divides by two ranks."""

    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self, depth: int = 2, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))
        self.register_buffer("calls", torch.tensor([3, 1, 2]))
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].up.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.shift.to(x.dtype)  # DeepSpeed may keep buffers in fp32
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def batch_of(step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of a step, (BATCH / ranks, 3) each."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, targets = torch.randint(0, WORDS, (2, BATCH, 3), generator=generator)
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return tokens[own], targets[own]


@dataclass(frozen=True)
class Case:
    """One checkpoint. optimizer: of torch. zero: further keys of `zero_optimization`."""

    stage: int
    ranks: int = 1
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": LR, "weight_decay": 0.1, "betas": (0.9, 0.95)})
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    groups: bool = False
    """True for two param groups: matrices with weight decay, the rest without."""
    client_state: dict[str, Any] = field(default_factory=dict)
    universal: bool = False


def param_groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not case.groups:
        return [{"params": trained}]
    # DeepSpeed's stage 3 empties parameters, and keeps their shapes.
    matrices = {id(parameter): len(getattr(parameter, "ds_shape", parameter.shape)) > 1 for parameter in trained}
    decayed = [parameter for parameter in trained if matrices[id(parameter)]]
    others = [parameter for parameter in trained if not matrices[id(parameter)]]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": LR, "warmup_num_steps": 8, "warmup_type": "linear"},
}
_FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}

CASES: dict[str, Case] = {
    "stage0-fp32": Case(0),
    "stage0-bf16": Case(0, dtype="bf16"),
    "stage1-fp32": Case(1, ranks=2),
    "stage1-bf16": Case(1, ranks=2, dtype="bf16"),
    "stage1-frozen": Case(1, ranks=2, model={"frozen": True}),
    "stage2-fp32": Case(
        2,
        groups=True,
        config={"scheduler": _WARMUP},
        client_state={"epoch": 5, "best": 0.25, "order": [2, 0, 1]},
    ),
    "stage2-bf16": Case(2, ranks=2, dtype="bf16", groups=True),
    "stage2-fp16": Case(2, dtype="fp16", config={"fp16": _FP16}),
    "stage2-frozen": Case(2, ranks=2, model={"frozen": True}),
    "stage2-tied": Case(2, ranks=2, model={"tied": True}),
    "stage2-adam": Case(2, optimizer="Adam"),
    "stage2-sgd": Case(
        2,
        ranks=2,
        optimizer="SGD",
        hyper={"lr": LR, "momentum": 0.9, "weight_decay": 0.1},
        config={"zero_allow_untested_optimizer": True},
    ),
    "stage2-reordered": Case(2, ranks=2, zero={"round_robin_gradients": True, "parameter_alignment": True}),
    "stage3-fp32": Case(3, ranks=2, groups=True, zero={"sub_group_size": 60}),
    "stage3-bf16": Case(3, ranks=2, dtype="bf16"),
    "stage3-frozen": Case(3, ranks=2, model={"frozen": True}),
    "stage3-tied": Case(3, model={"tied": True}),
    "universal-stage2": Case(2, ranks=2, model={"depth": 1, "frozen": True}, universal=True),
    "universal-stage3": Case(3, ranks=2, model={"depth": 1}, universal=True),
}

"""A model whose steps each train other parts, and the drawing of such steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.loops import Result
from support.models import seeded

WIDTH = 8
PARTS = 4
MODES = ("train", "detach", "detach_input", "no_grad", "frozen", "eval", "reentrant", "checkpoint")
"""Ways in which a step may run a part. `detach`: none of its parameters gets a gradient. `detach_input`: nothing before
it does. `frozen`: its parameters require none during the step."""


class Use(NamedTuple):
    """A part's use in a step. penalized: its output adds a term to the loss."""

    part: int
    mode: str
    penalized: bool = False


Uses = tuple[Use, ...]
"""The uses of a step, in order."""


class Part(nn.Module):
    """A layer whose parameters differ in what autograd saves for them: a bias and a shift need nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x + self.shift)) + self.linear(x)


class Changing(nn.Module):
    """Runs parts as each call says."""

    def __init__(self, parts: int = PARTS) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(parts))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor, uses: Uses) -> torch.Tensor:
        x = self.table(tokens)
        penalty = torch.zeros(())
        for use in uses:
            x = _run(self.parts[use.part], x, use.mode)
            if use.penalized:
                penalty = penalty + x.square().mean()
        return self.out(x).square().mean() + 0.1 * penalty


def _run(part: nn.Module, x: torch.Tensor, mode: str) -> torch.Tensor:
    out: torch.Tensor
    if mode == "no_grad":
        with torch.no_grad():
            out = part(x)
        return x + out
    if mode in ("reentrant", "checkpoint"):
        out = checkpoint(part, x, use_reentrant=mode == "reentrant")
        return out
    if mode == "detach_input":
        x = x.detach()
    out = part(x)
    return x + out.detach() if mode == "detach" else out


def prepare(model: nn.Module, uses: Uses) -> None:
    """Freeze and unfreeze parts, and set their training mode, as a loop does before a step."""
    parts = model.parts
    assert isinstance(parts, nn.ModuleList)
    modes = {use.part: use.mode for use in uses}
    for number, part in enumerate(parts):
        part.requires_grad_(modes.get(number) != "frozen")
        part.train(modes.get(number) != "eval")


def draw_uses(source: random.Random, parts: int = PARTS) -> Uses:
    """Draw the uses of a step: some parts, in any order, some of them twice."""
    count = source.randint(1, parts + 1)
    drawn = [source.randrange(parts) for _ in range(count)]
    frozen = source.random() < 0.2
    modes = [mode for mode in MODES if frozen or mode != "frozen"]
    return tuple(Use(part, source.choice(modes), source.random() < 0.3) for part in drawn)


ALL = tuple(Use(part, "train") for part in range(4))


def with_mode(part: int, mode: str) -> Uses:
    return tuple(use._replace(mode=mode) if use.part == part else use for use in ALL)


CHANGES: dict[str, tuple[Uses, Uses]] = {
    "the first parts are detached": (ALL, (*ALL[:2], Use(2, "detach_input"), ALL[3])),
    "one part is detached": (ALL, with_mode(1, "detach")),
    "a part without a graph": (ALL, with_mode(1, "no_grad")),
    "a frozen part": (ALL, with_mode(2, "frozen")),
    "a frozen first part": (ALL, with_mode(0, "frozen")),
    "a part left out": (ALL, ALL[1:]),
    "a part used twice": (ALL, (*ALL, ALL[0])),
    "another order": (ALL, ALL[::-1]),
    "a loss term": (ALL, tuple(use._replace(penalized=use.part == 1) for use in ALL)),
    "a loss term of a detached part": (
        with_mode(2, "detach_input"),
        (*ALL[:1], Use(1, "train", True), Use(2, "detach_input"), ALL[3]),
    ),
    "a reentrant checkpoint": (ALL, with_mode(1, "reentrant")),
    "a second reentrant checkpoint": (with_mode(1, "reentrant"), (*with_mode(1, "reentrant"), Use(1, "reentrant"))),
    "a reentrant checkpoint that is detached": (
        (Use(0, "reentrant"), Use(1, "detach_input"), Use(0, "reentrant")),
        (Use(0, "reentrant"), Use(1, "train"), Use(0, "reentrant")),
    ),
    "a checkpoint": (ALL, with_mode(1, "checkpoint")),
    "other parts": (ALL[:2], ALL[2:]),
    "an eval part": (ALL, with_mode(1, "eval")),
}
"""Name of a change → the uses of one step, and of another."""


def tokens_of(step: int) -> torch.Tensor:
    """Return the batch of a micro-step: (4, 3)."""
    return torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(step))


def plain_steps(steps: Sequence[Uses], accumulation: int, clip: float) -> Result:
    """Train in plain PyTorch."""
    model = seeded(Changing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for number, uses in enumerate(steps, 1):
        prepare(model, uses)
        loss = model(tokens_of(number), uses)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})

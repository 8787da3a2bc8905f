"""Base class of a model's parts, the context that they share, and the tables that list them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

WIDTH, LENGTH, BATCH, VOCABULARY = 8, 4, 3, 11


class Deliberate(Exception):
    """Raised by a part because its case says so."""


class Context:
    """State that all parts share in one forward.

    tokens: (batch, length) int64. step: number of the step. passed: part's number → a Parameter, or an object holding
    one, for later parts. raises: "forward", "pre-hook" or "backward": where parts that can raise do so; "": nowhere.
    """

    def __init__(self, tokens: torch.Tensor, step: int) -> None:
        self.tokens = tokens
        self.step = step
        self.passed: dict[int, Any] = {}
        self.raises = ""


class Part(nn.Module):
    """A part of the model: (batch, length, width) and the context → (batch, length, width).

    number: its position in the order of construction. variant: one of the variants listed for its kind.
    """

    def __init__(self, number: int, variant: str, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self.number = number
        self.variant = variant
        self.parts = nn.ModuleList(children)
        self.make()

    def make(self) -> None:
        """Create parameters and submodules."""

    def run_parts(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        for part in self.parts:
            x = part(x, context)
        return x


Kind = TypeVar("Kind", bound=type[Part])
LEAVES: dict[str, tuple[str, ...]] = {}
"""kind → variants, for parts without children."""
WRAPPERS: dict[str, tuple[str, ...]] = {}
"""kind → variants, for parts that run other parts."""
_CLASSES: dict[str, type[Part]] = {}


def leaf(kind: str, *variants: str) -> Callable[[Kind], Kind]:
    """List a part without children."""
    return _listed(LEAVES, kind, variants)


def wrapper(kind: str, *variants: str) -> Callable[[Kind], Kind]:
    """List a part with children."""
    return _listed(WRAPPERS, kind, variants)


def _listed(table: dict[str, tuple[str, ...]], kind: str, variants: tuple[str, ...]) -> Callable[[Kind], Kind]:
    def add(made: Kind) -> Kind:
        table[kind] = variants
        _CLASSES[kind] = made
        return made

    return add


def make_part(kind: str, number: int, variant: str, children: Sequence[nn.Module]) -> Part:
    return _CLASSES[kind](number, variant, children)


def weight(*shape: int, scale: float = 0.3) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) * scale)


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add the result of a part to its input as a bounded residual, so that no case overflows."""
    return x + 0.5 * torch.tanh(y)

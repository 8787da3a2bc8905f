"""The model of a case, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fuzz.case import Case, Node
from fuzz.parts import BATCH, LENGTH, VOCABULARY, WIDTH, Context, Part
from fuzz.registry import make_part

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """The parts one after the other, then a head: (batch, length, width) → mean squared error with the targets."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._number = 0
        self.dtype = torch.float32
        self.parts = nn.ModuleList(self._make(node) for node in case.nodes)
        self.head_kind = case.head
        if case.head != "none":
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if case.head == "shared with first":  # tied across blocks
            for parameter in self.parts.parameters():
                if parameter.shape == (WIDTH, WIDTH) and parameter.dtype == torch.float32:
                    self.head.weight = parameter
                    break
        self.inputs = nn.Linear(WIDTH, WIDTH)

    def _make(self, node: Node) -> Part:
        children = [self._make(child) for child in node.children]
        self._number += 1
        part = make_part(node.kind, self._number, node.variant, children)
        if node.frozen:
            inside = {id(p) for child in children for p in child.parameters()}
            for parameter in part.parameters():
                if id(parameter) not in inside:
                    parameter.requires_grad_(False)
        return part

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inputs(x.to(self.dtype))
        return out

    def end(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.head_kind == "tied":
            x = F.linear(self.head(x), self.head.weight.t())
        elif self.head_kind != "none":
            x = self.head(x)
        return F.mse_loss(x.float(), target)

    def in_dtype(self, dtype: torch.dtype) -> Net:
        """The model with its fp32 values in `dtype`."""
        self.dtype = dtype
        for values in (*self.parameters(), *self.buffers()):
            if values.dtype == torch.float32 != dtype:
                values.data = values.data.to(dtype)
        return self

    def forward(self, x: torch.Tensor, target: torch.Tensor, context: Context) -> torch.Tensor:
        x = self.begin(x)
        for part in self.parts:
            x = part(x, context)
        return self.end(x, target)


def build(case: Case) -> Net:
    """Construct the model. Its values depend on the case only."""
    torch.default_generator.manual_seed(case.seed)
    return Net(case).in_dtype(DTYPES[case.loop.dtype])


class Batch:
    """x and target of (batch, length, width), and tokens of (batch, length)."""

    def __init__(self, case: Case, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * case.seed + number)
        self.x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        self.target = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        self.tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)

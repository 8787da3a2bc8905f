"""Quantised weights as tensor subclasses of inner tensors, and a model of frozen ones with low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from support.models import Linears


class Rows(torch.Tensor):
    """int8 codes (rows, width) and a scale (rows, 1) behind one tensor. The scale may be such a tensor itself."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Rows:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def dequantize(self) -> torch.Tensor:
        scale = self.scale.dequantize() if isinstance(self.scale, Rows) else self.scale
        return self.codes.to(self.dtype) * scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Rows:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].codes), func(args[0].scale))
        if func is aten.copy_.default:
            for mine, other in ((args[0].codes, args[1].codes), (args[0].scale, args[1].scale)):
                mine.copy_(other)
            return args[0]
        if func is aten.t.default:  # a view, which autograd saves in place of the parameter
            return Columns(args[0])
        args, kwargs = tree_map_only(Rows, Rows.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


class Columns(torch.Tensor):
    """The transpose of `Rows`."""

    rows: Rows

    @staticmethod
    def __new__(cls, rows: Rows) -> Columns:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(reversed(rows.shape)), dtype=rows.dtype, device=rows.device
        )  # type: ignore[attr-defined]
        made.rows = rows
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> Any:
        return ["rows"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Columns:
        return cls(inner["rows"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.t.default:
            return Rows(args[0].rows.codes, args[0].rows.scale)
        if func is torch.ops.aten.detach.default:
            return cls(args[0].rows)
        args, kwargs = tree_map_only(Columns, lambda each: each.rows.dequantize().t(), (args, kwargs or {}))
        return func(*args, **kwargs)


def rows(weight: torch.Tensor) -> Rows:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Rows((weight / scale).round().to(torch.int8), scale)


def rows_twice(weight: torch.Tensor) -> Rows:
    """Return `rows` whose scale is quantised too, as in QLoRA."""
    once = rows(weight)
    return Rows(once.codes, rows(once.scale))


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank adapter, as in PEFT."""

    def __init__(self, width: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=bias).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Recomputed(Adapted):
    """The same, recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def adapted(
    quantise: Callable[[torch.Tensor], torch.Tensor] = rows,
    kind: type[Adapted] = Adapted,
    depth: int = 6,
    dtype: torch.dtype | None = None,
) -> Linears:
    """Return a model of `depth` adapted layers, whose frozen weights are quantised. dtype: of the model."""
    model = Linears()
    model.layers = nn.ModuleList(kind() for _ in range(depth))
    model.to(dtype)
    for layer in model.layers:
        layer.base.weight = nn.Parameter(quantise(layer.base.weight.detach()), requires_grad=False)  # type: ignore[union-attr]
    return model


def dequantised(*options: Any) -> Linears:
    """Return the model of `adapted` with ordinary parameters of the same values."""
    model = adapted(*options)
    for layer in model.layers:
        weight: torch.Tensor = layer.base.weight  # type: ignore[assignment,union-attr]
        layer.base.weight = nn.Parameter(weight.dequantize(), requires_grad=False)  # type: ignore[union-attr]
    return model

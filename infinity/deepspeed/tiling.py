"""`zero.TiledLinear` with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

import infinity.nn.tiling as tiling
from infinity.deepspeed.zero_init import GatheredParameters
from infinity.errors import UsageError
from infinity.nn.pieces import Pieces


class TiledLinear(tiling.TiledLinear):
    """`nn.Linear` in in_splits × out_splits tiles, which run in sequence; see `infinity.nn.TiledLinear`.

    input_is_already_split: forward takes a sequence of in_splits tensors, (..., features of a tile).
    combine_out_splits: False: forward returns a list of out_splits tensors. init_linear: a layer whose values are
    copied. options: device and dtype. linear_cls: only nn.Linear; others raise UsageError.

    State dicts and checkpoints have `weight` and `bias` of the whole layer, where DeepSpeed's have those of `linears`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **options: Any,
    ) -> None:
        if linear_cls is not nn.Linear:
            raise UsageError(f"TiledLinear(linear_cls={linear_cls.__name__}) is not supported: tiles are nn.Linear")
        if unknown := options.keys() - {"device", "dtype"}:
            raise UsageError(f"TiledLinear has no argument {min(unknown)}: pass device and dtype, as to nn.Linear")
        super().__init__(in_features, out_features, bias, in_splits=in_splits, out_splits=out_splits, **options)
        self.in_splits, self.out_splits, self.use_bias = in_splits, out_splits, bias
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @property
    def linears(self) -> list[list[nn.Module]]:
        """The tiles: linears[output split][input split]."""
        return [[*self.tiles[first : first + self.in_splits]] for first in range(0, len(self.tiles), self.in_splits)]

    @property
    def out_parts(self) -> list[int]:
        """Bounds of the output's parts: part `i` has outputs out_parts[i] to out_parts[i + 1]."""
        sizes: list[Any] = [row[0].out_features for row in self.linears]
        return [0, *accumulate(sizes)]

    @property
    def in_parts(self) -> list[int]:
        """Bounds of the input's parts, as in `out_parts`."""
        sizes: list[Any] = [tile.in_features for tile in self.linears[0]]
        return [0, *accumulate(sizes)]

    def forward(self, input_: Any) -> Any:
        split = self.input_is_already_split and self.in_splits > 1
        if split and len(input_) != self.in_splits:
            raise UsageError(f"the input has {len(input_)} parts, and the layer in_splits={self.in_splits}")
        outputs = list(self.parts_of(input_) if split else self.parts(input_))
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias of `other`, a layer of the same shape. Collective in an engine of stage 3."""
        values = {"weight": other.weight, "bias": other.bias} if self.use_bias else {"weight": other.weight}
        shapes: Sequence[Any] = [None if value is None else tuple(value.shape) for value in values.values()]
        expected = [(self.out_features, self.in_features), (self.out_features,)][: len(values)]
        if [*shapes] != expected or (not self.use_bias and other.bias is not None):
            raise UsageError(f"the layer to copy has shapes {[*shapes]}, expected {expected}, bias={self.use_bias}")
        pieces = Pieces(self)
        for name, parameter in self.named_parameters():
            piece = pieces.of(name, parameter)
            with GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(values[piece.name][piece.place])

"""Linear layers that run as tiles in sequence, so that memory holds a tile instead of the layer.

    model.head = TiledLinear(8192, 128_000, bias=False, max_bytes="256MiB")
    names = tile(model, max_bytes="256MiB")

An engine makes each tile a unit of its own, which it fetches for the tile's part of the forward and of the backward.

Output tiles give parts of the output. Each element of the output, and of the gradients of weight and bias, is the same
sum as in `nn.Linear`. The gradient of the input is a sum over tiles, each rounded to its dtype. Input tiles give
summands of the output, which is then such a sum, too. A kernel may add in another order for another number of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import UsageError
from infinity.nn.pieces import MARK, Piece, Tiled, slices, view_of
from infinity.plan.formats import BLOCK
from infinity.plan.frozen import GROUP
from infinity.sizes import parse_size


class LinearTile(nn.Linear):
    """A tile of a linear layer. fan_in: number of inputs of the layer, on which its initial values depend."""

    def __init__(self, in_features: int, out_features: int, bias: bool, fan_in: int, **made: Any) -> None:
        self.fan_in = fan_in  # before torch's constructor, which draws the initial values
        super().__init__(in_features, out_features, bias, **made)

    def reset_parameters(self) -> None:
        """Draw values as `nn.Linear` does: uniform in ±1/sqrt(fan_in)."""
        bound = 1 / math.sqrt(self.fan_in)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class TiledLinear(Tiled):
    """`nn.Linear` whose weight is a grid of tiles: (..., in_features) → (..., out_features).

    out_splits: number of parts of the output. max_bytes: in its place, the largest weight of a tile, in bytes of the
    present dtype or as text ("256MiB"). in_splits: number of parts of the input, which reorders sums; use it only where
    one row is too large. Parts need not be equal: the first ones are larger by one. device, dtype: as in `nn.Linear`.

    Memory holds one tile at a time if the layer is built on the meta device or under `infinity.Init`. `state_dict` has
    `weight` and `bias` of the whole layer. The parameters are those of `tiles`, output by output, inputs fastest.
    Raises UsageError for splits or sizes out of range.
    """

    tiles: nn.ModuleList

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int | None = None,
        max_bytes: int | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        columns = _parts("in_splits", in_features, in_splits)
        if max_bytes is not None:
            if out_splits is not None:
                raise UsageError("out_splits and max_bytes were both passed: pass one of them")
            width = (dtype or torch.get_default_dtype()).itemsize * columns[0]
            rows = rows_of(in_features, out_features, bias, width, size_of(max_bytes))
        else:
            rows = _parts("out_splits", out_features, 1 if out_splits is None else out_splits)
        self._make(rows, columns, bias, device=device, dtype=dtype)

    @classmethod
    def of_linear(cls, linear: nn.Linear, rows: Sequence[int]) -> TiledLinear:
        """Return a layer whose tiles, of these numbers of output features, are views of the parameters of `linear`.

        `linear` keeps no values, so that other holders of its parameters do not share the tiles' memory.
        """
        layer = cls.__new__(cls)
        layer._make(rows, [linear.in_features], linear.bias is not None, device="meta", dtype=linear.weight.dtype)
        for name, piece in layer.pieces():
            path, _, own = name.rpartition(".")
            setattr(layer.get_submodule(path), own, view_of(linear.get_parameter(piece.name), piece))
        for parameter in linear.parameters():
            parameter.data = parameter.data.new_empty(0)
        for module in layer.modules():
            module.training = linear.training
            if hasattr(linear, MARK):
                setattr(module, MARK, getattr(linear, MARK))
        return layer

    def counterpart(self, linear: nn.Module) -> nn.Module:
        """Return `linear` in the same tiles, if it is the layer that `infinity.nn.tile` would have replaced by this."""
        if type(linear) is not nn.Linear or (linear.bias is not None) != self.has_bias:
            return linear
        shape = (linear.out_features, linear.in_features)
        same = shape == (self.out_features, self.in_features) and len(self.columns) == 1
        return TiledLinear.of_linear(linear, self.rows) if same else linear

    def _make(self, rows: Sequence[int], columns: Sequence[int], bias: bool, **made: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.has_bias = sum(columns), sum(rows), bias
        self.rows, self.columns = list(rows), list(columns)
        self.tiles = nn.ModuleList(
            LinearTile(width, height, bias and not column, self.in_features, **made)
            for height in rows
            for column, width in enumerate(columns)
        )

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        shape = (self.out_features, self.in_features)
        places = [(rows, columns) for rows in slices(self.rows) for columns in slices(self.columns)]
        for number, place in enumerate(places):
            yield f"tiles.{number}.weight", Piece("weight", shape, place)
        for number, (rows, columns) in enumerate(places):
            if self.has_bias and not columns.start:
                yield f"tiles.{number}.bias", Piece("bias", shape[:1], (rows,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts(x)), -1)

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of the output in order, (..., rows of a tile), each when its tiles have run."""
        return self.parts_of(x.split(self.columns, -1) if len(self.columns) > 1 else (x,))

    def parts_of(self, inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield `parts` of an input that was split as the weight's columns."""
        self.check_copies()
        tiles = iter(self.tiles)
        for _ in self.rows:
            summands = (next(tiles)(part) for part in inputs)
            total = next(summands)
            for summand in summands:
                total = total + summand
            yield total

    def extra_repr(self) -> str:
        splits = f"in_splits={len(self.columns)}, out_splits={len(self.rows)}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, {splits}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight" or (name == "bias" and self.has_bias):
            raise AttributeError(
                f"{name} of a TiledLinear is in its tiles: use tiles[i].{name}, or read {name!r} of state_dict(). Code "
                f"that reads {name} of a layer instead of calling it needs nn.Linear."
            )
        return None if name == "bias" else super().__getattr__(name)


def rows_of(in_features: int, out_features: int, bias: bool, width: int, max_bytes: int) -> list[int]:
    """Return the output features of each tile.

    width: bytes of a row. Tiles have at most `max_bytes`, and are equal except for the last one. Where they may have
    that many rows, weight and bias begin at blocks of 8-bit moments, or else weights at groups of `infinity.frozen`.
    """
    limit = max_bytes // width
    if not limit:
        raise UsageError(
            f"max_bytes is {max_bytes}, and one row of the weight has {width} bytes: pass at least that, or in_splits"
        )
    blocks = BLOCK if bias else BLOCK // math.gcd(BLOCK, in_features)
    step = next(rows for rows in (blocks, GROUP // math.gcd(GROUP, in_features), 1) if rows <= limit)
    limit -= limit % step
    rows = math.ceil(out_features / math.ceil(out_features / limit))
    rows = min(-(-rows // step) * step, out_features)
    return [min(rows, out_features - start) for start in range(0, out_features, rows)]


def size_of(max_bytes: int | str) -> int:
    """Return `max_bytes` in bytes. Raises UsageError for text and numbers that are no size."""
    try:
        return parse_size(max_bytes)
    except ValueError as error:
        raise UsageError(f"max_bytes: {error}") from None


def _parts(name: str, features: int, splits: int) -> list[int]:
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= features:
        raise UsageError(f"{name} is {splits!r}: pass a number from 1 to the {features} features")
    return [features // splits + (number < features % splits) for number in range(splits)]

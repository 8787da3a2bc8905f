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
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from infinity.comm.dtensor import is_plain
from infinity.construction.materialize import Source, note_source, source_of
from infinity.errors import ModelError, UsageError
from infinity.model.hooks import UnitParameters
from infinity.nn.pieces import Piece, Tiled
from infinity.observe.log import logger
from infinity.plan.formats import BLOCK
from infinity.sizes import parse_size
from infinity.units.compiled import own_name

_MARK = "_is_hf_initialized"
"""transformers marks modules that it has initialised."""


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
            rows = _rows_of(in_features, out_features, bias, width, _size_of(max_bytes))
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
            setattr(layer.get_submodule(path), own, _view(linear.get_parameter(piece.name), piece))
        for parameter in linear.parameters():
            parameter.data = parameter.data.new_empty(0)
        for module in layer.modules():
            module.training = linear.training
            if hasattr(linear, _MARK):
                setattr(module, _MARK, getattr(linear, _MARK))
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
        places = [(rows, columns) for rows in _slices(self.rows) for columns in _slices(self.columns)]
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


@dataclass(frozen=True)
class _Part:
    """Reads a part of a flattened parameter from its source. start: the part's first element."""

    source: Source
    start: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(self.start + start, self.start + stop)


def _view(whole: nn.Parameter, piece: Piece) -> nn.Parameter:
    # On the meta device tiles share the layer's count of edits (`detach`), by which construction checks that none is
    # lost. Elsewhere each has its own (`data`): an edit of one tile is none of another.
    values = whole.detach() if whole.is_meta else whole.data
    part = nn.Parameter(values[piece.place], whole.requires_grad)
    part.__dict__.update(vars(whole))
    source = source_of(whole)
    if source is not None:
        assert piece.run is not None
        note_source(part, _Part(source, piece.run[0]))
    return part


def _rows_of(in_features: int, out_features: int, bias: bool, width: int, max_bytes: int) -> list[int]:
    """Return the output features of each tile.

    width: bytes of a row. Tiles have at most `max_bytes`, and are equal except for the last one. Where they may have
    that many rows, weight and bias begin at blocks of 8-bit moments.
    """
    limit = max_bytes // width
    if not limit:
        raise UsageError(
            f"max_bytes is {max_bytes}, and one row of the weight has {width} bytes: pass at least that, or in_splits"
        )
    step = BLOCK if bias else BLOCK // math.gcd(BLOCK, in_features)
    step = step if step <= limit else 1
    limit -= limit % step
    rows = math.ceil(out_features / math.ceil(out_features / limit))
    rows = min(-(-rows // step) * step, out_features)
    return [min(rows, out_features - start) for start in range(0, out_features, rows)]


def _size_of(max_bytes: int | str) -> int:
    """Return `max_bytes` in bytes. Raises UsageError for text and numbers that are no size."""
    try:
        return parse_size(max_bytes)
    except ValueError as error:
        raise UsageError(f"max_bytes: {error}") from None


def _parts(name: str, features: int, splits: int) -> list[int]:
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= features:
        raise UsageError(f"{name} is {splits!r}: pass a number from 1 to the {features} features")
    return [features // splits + (number < features % splits) for number in range(splits)]


def _slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def tile(model: nn.Module, max_bytes: int | str) -> list[str]:
    """Replace each `nn.Linear` of `model` whose weight is larger than `max_bytes` by a `TiledLinear`, in place.

    max_bytes: largest weight of a tile, in bytes of the present dtype or as text ("256MiB"). Returns the names of the
    replaced modules. Only outputs are split, so the weight is cut into rows.

    Tiles are views of the layer's memory: nothing is copied. Values on the meta device, sources of `load_pretrained`
    and files of `infinity.Init` stay as they are. Call it before an optimizer or an engine gets the parameters, which
    are new ones. The old layer has no values afterwards. A warning names other parameters that are larger.

    Raises, before any change: UsageError for a model that an engine has, ModelError for a layer that cannot be
    replaced: the model itself, one whose parameters are shared (tied) or no plain tensors, one with hooks, gradients or
    a forward of its own, and one whose rows are larger than `max_bytes`.
    """
    limit = _size_of(max_bytes)
    if any(isinstance(module._parameters, UnitParameters) for module in model.modules()):
        raise UsageError("the model already belongs to an engine: call infinity.nn.tile before infinity.initialize")
    found = {module: own_name(name) for name, module in model.named_modules() if _is_large(module, limit)}
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(f"{path}.{name}")
    rows = {}
    for module, name in found.items():
        problem = _problem(model, module, names)
        width = module.in_features * module.weight.element_size()
        if problem is None and width > limit:
            problem = f"one row of the weight has {width} bytes, more than max_bytes ({limit})"
        if problem is not None:
            raise ModelError(f"{name or 'the model'} cannot be replaced by tiles: {problem}.")
        rows[module] = _rows_of(module.in_features, module.out_features, module.bias is not None, width, limit)
    replaced = {module: TiledLinear.of_linear(module, rows[module]) for module in found}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    tiled = {name: module for name, module in model.named_modules() if isinstance(module, TiledLinear)}
    coarse = [name for name, module in tiled.items() if any(_exceeds(p, limit) for p in module.parameters())]
    if coarse:
        logger.warning(
            "infinity.nn.tile: tiles of an earlier call stay, though they are larger than max_bytes: %s. Tile a model "
            "once, with the smaller max_bytes.",
            ", ".join(coarse),
        )
    own = {id(p) for module in tiled.values() for p in module.parameters()}
    left = [name for name, p in model.named_parameters() if _exceeds(p, limit) and id(p) not in own]
    if left:
        logger.warning(
            "infinity.nn.tile: only plain nn.Linear layers are tiled. Larger than max_bytes remain: %s",
            ", ".join(left),
        )
    return list(found.values())


def _is_large(module: nn.Module, limit: int) -> bool:
    # Subclasses compute something else, or have owners that read their weights.
    if type(module) is not nn.Linear or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False
    return _exceeds(module.weight, limit)


def _exceeds(parameter: torch.Tensor, limit: int) -> bool:
    return parameter.numel() * parameter.element_size() > limit


def _problem(model: nn.Module, module: nn.Linear, names: dict[int, list[str]]) -> str | None:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if module is model:
        return "it is the model itself. Construct infinity.nn.TiledLinear in its place"
    for parameter in own:
        holders = names[id(parameter)]
        if len(holders) > 1:
            return f"one parameter is {' and '.join(holders)} (tied weights). Untie them, or raise max_bytes"
        if not is_plain(parameter):
            return f"a parameter is a {type(parameter).__name__}. Replace it before parallelize_module or zero.Init"
        if parameter.grad is not None:
            return "it has a gradient. Call zero_grad(set_to_none=True) first"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a parameter has hooks. Register them on the tiles' parameters"
    hooks = (value for name, value in vars(module).items() if name.endswith(("_hooks", "_pre_hooks")))
    if "forward" in vars(module) or any(hooks):
        return "it has hooks, or a forward of its own. Call infinity.nn.tile before they are set"
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        return "it has other parameters, buffers or modules than nn.Linear"
    return None

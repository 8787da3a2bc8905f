"""Fused experts of `transformers` that run as tiles in sequence, so that memory holds a few experts instead of all.

    names = tile(model, max_bytes="256MiB")

A module of fused experts keeps a tensor (E, …) for each projection of its E experts. A tile is such a module with the
slices of some consecutive experts. It gets the rows that the router sends to them, and runs the class's own forward.

Every sum is taken in the order of the untiled module, so outputs and gradients have the same bits where a kernel
computes an expert alike for any number of experts, as torch's do on a CPU. Experts that no row reaches get zero
gradients. In a forward without gradients on one rank, their tiles are not called, and an engine does not read them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infinity.errors import UsageError
from infinity.model.hooks import UnitParameters
from infinity.nn.pieces import MARK, Piece, Tiled, slices, view_of
from infinity.plan.formats import BLOCK

WIDE_SUMS = ("Inkling2Experts", "NemotronHExperts", "OpenAIPrivacyFilterExperts")
"""Classes whose own forward sums experts in another dtype than that of the hidden states, which tiles return."""

UNDECORATED = ("Step3p7Experts",)
"""Classes of transformers that run their own forward alone, and are otherwise like those with implementations."""

SORTED = ("Llama4TextExperts", "JetMoeParallelExperts")
"""Classes that get rows sorted by expert: equally many of each expert, or a second argument has their numbers."""


class Order(NamedTuple):
    """Order in which an implementation of transformers takes rows and sums experts.

    by_expert: one call of the tile for each expert, and one sum after the other, by expert. Otherwise one call for a
    tile, and one sum over the experts of a token. repeats: each token's row is repeated before rows are chosen.
    stable: rows of an expert are in the order of tokens. Otherwise in that of `torch.sort`, as in transformers.
    """

    by_expert: bool = False
    repeats: bool = False
    stable: bool = True


IMPLEMENTATIONS = {
    "eager": Order(by_expert=True),
    "grouped_mm": Order(stable=False),
    "batched_mm": Order(repeats=True),
}


class _Idle(torch.autograd.Function):
    """(0, H) output of a tile without rows, whose parameters get zero gradients, as in the untiled module.

    Backward reads them as that of a tile with rows does, since other ranks, whose tokens chose the tile, fetch it then.
    nothing: rows of the hidden states, which make backward run if the parameters are frozen, too.
    """

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return nothing.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parameters, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        return grad, *(torch.zeros_like(p) if need else None for p, need in zip(parameters, needed, strict=True))


class ExpertsTile(nn.Module):
    """Base of the tiles' classes: the class of the untiled module, for some of its experts.

    A subclass of that class too, by which transformers finds the rule of initial values.
    """

    def forward(self, parts: Sequence[tuple[Tensor, ...]], nothing: Tensor) -> list[Tensor]:
        """Return the output of each part, (n, H). nothing: (0, H), returned if there is no part.

        A part has hidden states (n, H), the experts of these rows, (n, 1), counted from the tile's first, and weights,
        (n, 1); of a class of `SORTED`, hidden states and, where the class takes them, numbers of rows.
        """
        if not parts:
            return [_Idle.apply(nothing, *self.parameters(recurse=False))]  # type: ignore[no-untyped-call]
        return [super(ExpertsTile, self).forward(*part) for part in parts]

    def __reduce__(self) -> Any:
        return _new_tile, (type(self).__mro__[2],), self.__dict__


def _new_tile(kind: type[nn.Module]) -> nn.Module:
    tile: nn.Module = object.__new__(type(kind.__name__, (ExpertsTile, kind), {"__module__": __name__}))
    nn.Module.__init__(tile)
    return tile


class TiledExperts(Tiled):
    """Fused experts in tiles. counts: number of experts of each tile.

    `state_dict` has the tensors of all experts. The parameters are those of `tiles`.
    """

    tiles: nn.ModuleList
    config: Any

    def __init__(self, experts: nn.Module, counts: Sequence[int]) -> None:
        """Make tiles that are views of the parameters of `experts`, which keeps no values."""
        super().__init__()
        self.counts = list(counts)
        self.kind = type(experts)
        self.shapes = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
        self.tiles = nn.ModuleList(_tile_of(experts, count) for count in counts)
        if hasattr(experts, "config"):
            self.config = experts.config
        for name, piece in self.pieces():
            path, _, own = name.rpartition(".")
            part = view_of(experts.get_parameter(piece.name), piece)
            self.get_submodule(path).register_parameter(own, part)
        for parameter in experts.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)
        for module in (self, self.tiles):
            module.training = experts.training
            if hasattr(experts, MARK):
                setattr(module, MARK, getattr(experts, MARK))

    def counterpart(self, experts: nn.Module) -> nn.Module:
        """Return `experts` in the same tiles, if they are those that `infinity.nn.tile` would have replaced by this."""
        shapes = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
        return TiledExperts(experts, self.counts) if (type(experts), shapes) == (self.kind, self.shapes) else experts

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        for number, rows in enumerate(slices(self.counts)):
            for name, shape in self.shapes.items():
                place = (rows, *(slice(0, size) for size in shape[1:]))
                yield f"tiles.{number}.{name}", Piece(name, shape, place)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the untiled module returns, of the same arguments."""
        self.check_copies()
        for number, each in enumerate(self.tiles):
            if not isinstance(each, ExpertsTile):
                raise UsageError(
                    f"tile {number} of {self.kind.__name__} was replaced by a {type(each).__name__}, as peft's "
                    "target_parameters do: give adapters to other layers, or do not tile the experts"
                )
        taken = inspect.signature(self.kind.forward).bind(self, *args, **kwargs).arguments
        _, hidden, *routing = taken.values()
        if len(routing) < 2:
            return self._sorted(hidden, *routing)
        index, weights = routing
        order = self._order(hidden)
        # Gradients are sums over rows: their order is that of the untiled module.
        chosen = index.t().reshape(-1) if order.by_expert else index.reshape(-1)
        ids, at = torch.sort(chosen, stable=order.stable)
        rows = _rows_of(ids, sum(self.counts))
        if len(rows) > sum(self.counts):
            raise UsageError(
                f"a row is routed to expert {len(rows) - 1}, and the module has {sum(self.counts)}. infinity.nn.tile "
                "does not support expert parallelism: turn it off, or do not tile the model."
            )
        if order.by_expert:
            return self._by_expert(hidden, index, weights, at, rows)
        return self._by_tile(hidden, index, weights, ids, at, rows, order)

    def _by_expert(self, hidden: Tensor, index: Tensor, weights: Tensor, at: Tensor, rows: list[int]) -> Tensor:
        """One call for each expert that is hit, and one sum after the other, as the classes' own forwards do."""
        tokens, positions = (at % len(index)).split(rows), (at // len(index)).split(rows)
        final = torch.zeros_like(hidden)
        for tile, span, call in self._calls(rows):
            hit = [expert for expert in range(span.start, span.stop) if rows[expert]]
            if not call:
                continue
            parts = []
            for expert in hit:
                token = tokens[expert]
                local = torch.full((len(token), 1), expert - span.start, device=index.device)
                parts.append((hidden[token], local, weights[token, positions[expert], None]))
            outputs = tile(parts, hidden[:0])
            for expert, output in zip(hit or [span.start], outputs, strict=True):
                final.index_add_(0, tokens[expert], output.to(final.dtype))
        return final

    def _by_tile(
        self, hidden: Tensor, index: Tensor, weights: Tensor, ids: Tensor, at: Tensor, rows: list[int], order: Order
    ) -> Tensor:
        """One call for each tile, and one sum over the experts of a token, as `transformers.integrations.moe` does."""
        width, spans = index.shape[-1], [sum(rows[span]) for span in slices(self.counts)]
        if not order.stable:
            at = torch.cat([_presorted(*part) for part in zip(ids.split(spans), at.split(spans), strict=True)])
        if order.repeats:
            taken = hidden.repeat_interleave(width, dim=0)[at]
        else:
            # Rows are cast here, so that tiles return products in the dtype in which they are weighted.
            taken = hidden[at // width].to(_dtype_of(self.tiles[0]))
        outputs = []
        for (tile, span, call), some, local in zip(
            self._calls(rows), taken.split(spans), ids.split(spans), strict=True
        ):
            if call:
                # Weights of one give the products themselves, which are weighted below in the dtype of the weights.
                part = (some, (local - span.start)[:, None], some.new_ones(len(some), 1))
                outputs += tile([part] if len(some) else [], some[:0])
        found = torch.cat(outputs) if outputs else taken
        weighted = found * weights.reshape(-1)[at][:, None]
        back = torch.empty_like(at)
        back[at] = torch.arange(len(at), device=at.device)
        return weighted[back].view(*index.shape, hidden.shape[-1]).sum(1).to(hidden.dtype)

    def _sorted(self, hidden: Tensor, *sizes: Sequence[int]) -> Tensor:
        rows = list(sizes[0]) if sizes else [len(hidden) // sum(self.counts)] * sum(self.counts)
        parts = hidden.split([sum(rows[span]) for span in slices(self.counts)])
        outputs = []
        for (tile, span, call), part in zip(self._calls(rows), parts, strict=True):
            if call or not len(hidden):
                outputs += tile([(part, *(each[span] for each in sizes))], part)
        return torch.cat(outputs)

    def _calls(self, rows: list[int]) -> Iterator[tuple[nn.Module, slice, bool]]:
        """Yield (tile, its experts, whether to call it). rows: number of rows of each expert."""
        spans = slices(self.counts)
        calls = _called(list(self.tiles), [any(rows[span]) for span in spans])
        return zip(self.tiles, spans, calls, strict=True)

    def _order(self, hidden: Tensor) -> Order:
        name: Any = "eager" if self.kind.__name__ in UNDECORATED else self.config._experts_implementation
        if name not in IMPLEMENTATIONS:
            raise UsageError(
                f"experts_implementation is {name!r}, and tiles of experts support {', '.join(IMPLEMENTATIONS)}. Call "
                'model.set_experts_implementation("grouped_mm").'
            )
        if name == "eager" and self.kind.__name__ in WIDE_SUMS and hidden.dtype.itemsize < 4:
            raise UsageError(
                f"{self.kind.__name__} with experts_implementation 'eager' sums experts in fp32, and its tiles would "
                f'sum them in {hidden.dtype}. Call model.set_experts_implementation("grouped_mm").'
            )
        return IMPLEMENTATIONS[name]

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, experts={sum(self.counts)}, tiles={len(self.counts)}"

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("shapes", ()):
            raise AttributeError(
                f"{name} of fused experts is in their tiles: use tiles[i].{name}, or read {name!r} of state_dict(). "
                "Code that reads it instead of calling the module cannot be tiled."
            )
        return super().__getattr__(name)


def _rows_of(ids: Tensor, experts: int) -> list[int]:
    """Return the number of rows of each expert. On the meta device they are even, as for a load that is balanced."""
    if ids.is_meta:
        return [len(ids) // experts + (number < len(ids) % experts) for number in range(experts)]
    rows: list[int] = torch.bincount(ids, minlength=experts).tolist()
    return rows


def _presorted(ids: Tensor, at: Tensor) -> Tensor:
    """Return `at` in the order from which `torch.sort(ids)` makes the present one. ids: sorted.

    The tile sorts its rows again, and torch's sort exchanges rows of one expert.
    """
    return torch.empty_like(at).index_copy_(0, torch.sort(ids).indices, at)


def _called(modules: Sequence[nn.Module], needed: Sequence[bool]) -> list[bool]:
    """Return which of `modules` to call, in order, where the data needs some. Their units are fetched next.

    All of them, if gradients are recorded: a parameter that is not used gets a gradient of zeros, and no gradient would
    be another one. All of them on several ranks, which fetch units together: the data of another rank may need them.
    """
    if torch.is_grad_enabled():
        return [True] * len(modules)
    managed = [parameters for each in modules if isinstance(parameters := each._parameters, UnitParameters)]
    if managed and not managed[0].is_alone:
        return [True] * len(modules)
    for parameters in managed[:1]:
        chosen = (each._parameters for each, need in zip(modules, needed, strict=True) if need)
        parameters.expect([each for each in chosen if isinstance(each, UnitParameters)])
    return list(needed)


def _dtype_of(tile: nn.Module) -> torch.dtype:
    return next(tile.parameters(recurse=False)).dtype


def _tile_of(experts: nn.Module, count: int) -> nn.Module:
    """Return a tile of `count` experts without parameters. It shares what has none, such as the activation."""
    tile = _new_tile(type(experts))
    kept = {name: value for name, value in vars(experts).items() if name not in vars(tile) or name == "training"}
    tile.__dict__.update(kept, num_experts=count)
    tile._modules.update(experts._modules)
    return tile


def is_fused(module: nn.Module) -> bool:
    """Return whether `module` is a class of transformers' fused experts that can be tiled."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or not module._parameters:
        return False
    known = kind.__name__ in (*UNDECORATED, *SORTED) or hasattr(module, "_is_expert_parallel")
    return known and all(isinstance(parameter, nn.Parameter) for parameter in module._parameters.values())


def nbytes(experts: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in experts.parameters(recurse=False))


def counts_of(experts: nn.Module, limit: int) -> list[int] | str:
    """Return the number of experts of each tile, which has at most `limit` bytes, or why there are no such tiles.

    Where they may have that many experts, all tensors begin at blocks of 8-bit moments.
    """
    sizes = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
    total = getattr(experts, "num_experts", None)
    if not isinstance(total, int) or any(shape[:1] != (total,) for shape in sizes.values()):
        return f"num_experts is {total}, and its parameters have shapes {list(sizes.values())}"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are distributed (expert parallelism)"
    if experts._buffers or any(True for child in experts.children() for _ in (*child.parameters(), *child.buffers())):
        return "all of its experts share a parameter or buffer"
    width = nbytes(experts) // total
    if width > limit:
        return f"one expert has {width} bytes, more than max_bytes ({limit})"
    each = limit // width
    step = math.lcm(*(BLOCK // math.gcd(BLOCK, math.prod(shape[1:])) for shape in sizes.values()))
    each = each - each % step if step <= each else each
    count = math.ceil(total / each)
    each = min(each, -(-math.ceil(total / count) // step) * step) if step <= each else math.ceil(total / count)
    return [min(each, total - start) for start in range(0, total, each)]

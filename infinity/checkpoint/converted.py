"""Tensors that transformers keeps in another layout in its folders than in its models.

Folders of a mixture of experts have a tensor for each projection of each expert, and the model has one for all of them.
`from_pretrained` converts them by rules of transformers. Here each tensor is converted when it is read, by the same
rules. Experts are independent of each other, so only those are read that the part needs.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from infinity.checkpoint.tensors import Spec
from infinity.comm.side import Place
from infinity.construction.replay import of_transformers
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece


class Stored(Protocol):
    """A tensor of a folder."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> Spec: ...
    def read(self, start: int, stop: int) -> torch.Tensor: ...


@dataclass
class _Conversion:
    """The tensors of a folder that one rule makes tensors of the model from. sources: pattern of the rule → these."""

    rule: Any
    layer: str
    model: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    sources: dict[str, list[Stored]] = field(default_factory=dict)

    def __call__(self, read: Callable[[Stored, slice], Any], experts: slice) -> dict[str, torch.Tensor]:
        """Return name in the model → tensor. experts: those to convert, if the rule keeps them apart."""
        rule, chosen = copy.deepcopy(self.rule), experts if self.experts else slice(None)
        listed, rows = (chosen, slice(None)) if self._is_list else (slice(None), chosen)
        for pattern, tensors in self.sources.items():
            for each in tensors[listed]:
                rule.add_tensor(self.layer, each.name, pattern, partial(read, each, rows))
        found = rule.convert(self.layer, model=_Shapes(self.shapes, chosen), config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    @property
    def experts(self) -> int:
        """The number of experts, which are entries of the first dimension that the rule does not mix; else 0."""
        lists = self.sources.values()
        stored = {next(iter(tensor.spec.shape), 0) for tensors in lists for tensor in tensors}
        counts = {len(tensors) for tensors in lists} if self._is_list else stored
        is_apart = len(counts) == 1 and all(map(_keeps_experts, self.rule.operations[self._is_list :]))
        return counts.pop() if is_apart else 0

    @property
    def _is_list(self) -> bool:
        """True if the folder has a tensor for each expert. Otherwise its tensors have all experts."""
        first = self.rule.operations[0]
        return type(first).__name__ == "MergeModulelist" and first.dim == 0


@dataclass(frozen=True)
class _Shapes:
    """The model for rules, which depend on shapes of its parameters. A tiled model lacks them."""

    shapes: Mapping[str, tuple[int, ...]]
    experts: slice

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")[self.experts]


def _keeps_experts(operation: Any) -> bool:
    if type(operation).__name__ == "Transpose":
        return bool(operation.dim0 > 0 < operation.dim1)
    return type(operation).__name__ in ("Concatenate", "Chunk", "Interleave") and operation.dim > 0


class _Latest:
    """The last result of a conversion, which the next part of the tensor, or the next tensor, is probably part of."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int] | None = None
        self._found: dict[str, torch.Tensor] = {}

    def of(self, conversion: _Conversion, experts: slice) -> dict[str, torch.Tensor]:
        key = id(conversion), experts.start, experts.stop
        if key != self._key:
            self._key, self._found = None, {}  # before the next ones are read
            self._found = conversion(_read, experts)
            self._key = key
        return self._found


def _read(tensor: Stored, rows: slice) -> torch.Tensor:
    shape = tensor.spec.shape
    if rows == slice(None):
        return tensor.read(0, prod(shape)).view(shape)
    start, stop, _ = rows.indices(shape[0])
    return tensor.read(start * prod(shape[1:]), stop * prod(shape[1:])).view(-1, *shape[1:])


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the model, made from several of the folder, or the tile at `place` in it."""

    name: str
    spec: Spec
    conversion: _Conversion
    latest: _Latest
    place: Place = ()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor or tile, (stop - start,), in its saved dtype."""
        run = Piece(self.name, self.spec.shape, self.place).run
        if run is None:
            return self._values(slice(0, self.spec.shape[0]))[self.place].reshape(-1)[start:stop]
        start, stop = start + run[0], stop + run[0]
        width = prod(self.spec.shape[1:])
        experts = slice(start // width, -(-stop // width))
        if self.conversion.experts != self.spec.shape[0]:
            experts = slice(0, self.spec.shape[0])
        first = experts.start * width
        return self._values(experts).reshape(-1)[start - first : stop - first]

    def _values(self, experts: slice) -> torch.Tensor:
        return self.latest.of(self.conversion, experts)[self.name]

    def copy_to(self, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(self.read(0, target.numel()).view(target.shape))


def converted(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a folder by their names in the model, where transformers has rules for its class.

    shapes: name in the model → shape. saved: name in the folder → tensor. Raises CheckpointError if a rule fails.
    """
    if not of_transformers(model):
        return dict(saved)
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ModuleNotFoundError:  # transformers 4 has no rules
        return dict(saved)
    rules = mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": shapes}
    found: dict[str, Any] = {}
    conversions: dict[str, _Conversion] = {}
    for original in sorted(saved, key=loading.dot_natural_key):  # the order of experts
        name, pattern = loading.rename_source_key(original, renamings, converters, **prefix)
        if name not in shapes and original in shapes:  # in the model's layout, as `infinity export` writes it
            name, pattern = original, None
        if pattern is None:
            found[name] = saved[original]
        elif name in shapes:
            conversion = conversions.setdefault(name, _Conversion(of_pattern[pattern], name, model, shapes))
            conversion.sources.setdefault(pattern, []).append(saved[original])
        else:
            found[original] = saved[original]
    latest = _Latest()
    for name, conversion in conversions.items():
        first = next(iter(conversion.sources.values()))[0]
        try:
            values = conversion(lambda each, _: torch.empty(each.spec.shape, device="meta"), slice(None))
        except Exception as error:
            raise CheckpointError(
                f"{first.name} and other tensors of the folder cannot be converted to {name} by the rule of "
                f"transformers: {error}"
            ) from error
        for made, value in values.items():
            found[made] = ConvertedTensor(made, Spec(first.spec.dtype, tuple(value.shape)), conversion, latest)
    return found

"""Finds the units of an unmodified `nn.Module`: parameters that move together, and the modules that need them.

Needs no annotation. Repeated blocks (the children of a `ModuleList`) are units; tiny ones only if all of them together
are larger than `unit_size`. A subtree that fits in `unit_size` is a unit; a larger one is split, and its remaining
parameters belong to its parent. A parameter shared by several modules belongs to the first unit that holds it, and
every module that uses it acquires that unit.

Finds the units held at once, since a module holds its units while its submodules run, and those of a block. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from infinity.comm.dtensor import local
from infinity.optim.parameter_rule import ParameterRule
from infinity.plan.frozen import CODED_DTYPES
from infinity.plan.layout import Discovered, DiscoveredUnit, Member, UnitLayout
from infinity.plan.records import Record
from infinity.units.compiled import own_name, uncompiled
from infinity.units.stored import Stored, beside_codes, is_wrapper, named_stored, stored


def held_together(model: nn.Module, needed: Mapping[nn.Module, Sequence[int]]) -> set[frozenset[int]]:
    """Return the set of unit indices on each path from `model` down to a module without children.

    needed: module → units that its forward acquires, from `modules_to_hook`. Calls to modules that are not below the
    caller in the tree are not covered.
    """
    found: set[frozenset[int]] = set()
    seen: set[tuple[nn.Module, frozenset[int]]] = set()

    def visit(module: nn.Module, above: frozenset[int]) -> None:
        if (module, above) in seen:  # a shared module, reached before with the same units held
            return
        seen.add((module, above))
        held = above.union(needed.get(module, ()))
        children = list(module.children())
        for child in children:
            visit(child, held)
        if not children:
            found.add(held)

    visit(model, frozenset())
    return found


def blocks(model: nn.Module, unit_of: Mapping[int, int]) -> set[frozenset[int]]:
    """Return the set of unit indices of each entry of a `ModuleList`, without the entries that contain others.

    unit_of: id(stored tensor) → unit index.
    """

    def units(module: nn.Module) -> frozenset[int]:
        return frozenset(unit_of[id(each.tensor)] for each in named_stored(module) if id(each.tensor) in unit_of)

    def entries(module: nn.Module) -> list[nn.Module]:
        lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
        return [entry for each in lists for entry in each.children()]

    return {units(entry) for entry in entries(model) if not any(units(inner) for inner in entries(entry))}


# A subtree smaller than `unit_size / _CRUMB` does not justify a transfer of its own: it stays with its parent.
_CRUMB = 64

UNIT_SIZE = 64 << 20
"""Least bytes of `infinity.unit_size: "auto"`, and those on the CPU."""
_UNITS_ON_DEVICE = 16
"""Least number of the largest units that a device's memory holds. Some are fetched ahead and some have gradients."""


@dataclass(frozen=True)
class UnitParameters:
    """Parameters of one unit: of one dtype, all trainable or all frozen.

    root: path of the module that they belong to. parameters: or inner tensors of wrappers. wrappers: these wrappers.
    keeps: the engine's dtype does not apply. coded: `infinity.frozen` may store them in a code.
    """

    name: str
    root: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    wrappers: tuple[nn.Parameter, ...] = ()
    keeps: bool = False
    coded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


class _Walk:
    def __init__(self, model: nn.Module, unit_size: int, width: int | None) -> None:
        self.unit_size = unit_size
        self.width = width
        self.beside_codes = beside_codes(model)
        self.claimed: set[int] = set()
        self.groups: list[tuple[str, list[Stored]]] = []

    def nbytes(self, module: nn.Module) -> int:
        unclaimed = (each for p in module.parameters() if id(p) not in self.claimed for each in stored(p))
        return sum(local(each.tensor).numel() * self._width(each) for each in unclaimed)

    def _width(self, each: Stored) -> int:
        return each.tensor.element_size() if self.keeps_dtype(each) else self.width or each.tensor.element_size()

    def keeps_dtype(self, each: Stored) -> bool:
        """Return whether a tensor has a dtype that belongs to its format, and no code of the engine's."""
        return each.keeps_dtype or id(each.parameter) in self.beside_codes

    def claim(self, module: nn.Module, prefix: str, recurse: bool) -> list[Stored]:
        found = []
        for name, parameter in module.named_parameters(prefix, recurse=recurse):
            if id(parameter) not in self.claimed:
                self.claimed.add(id(parameter))
                found += stored(parameter, name)
        return found

    def whole(self, module: nn.Module, prefix: str) -> None:
        members = self.claim(module, prefix, recurse=True)
        if members:
            self.groups.append((prefix, members))

    def holds_blocks(self, module: nn.Module) -> bool:
        return any(
            isinstance(m, nn.ModuleList) and any(self.is_block(c) for c in m.children()) for m in module.modules()
        )

    def is_block(self, module: nn.Module) -> bool:
        has_children = next(module.children(), None) is not None
        return self.nbytes(module) >= self.unit_size // _CRUMB or (has_children and self.nbytes(module) > 0)

    def open(self, module: nn.Module, prefix: str) -> list[Stored]:
        """Form units below `module`. Returns the parameters left over for the caller's unit."""
        mine = len(self.groups)
        self.groups.append((prefix, []))  # reserves the place of the parent before its children
        left = self.claim(module, prefix, recurse=False)
        in_list = isinstance(module, nn.ModuleList)
        # Tiny entries stay with the parent, since each would be a transfer of its own.
        crumbs = [child for child in module.children() if in_list and not self.is_block(child)]
        apart = sum(map(self.nbytes, crumbs)) > self.unit_size  # such as tiles: too much for the parent's unit
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if apart and child in crumbs:
                self.whole(child, path)
            else:
                left += self.visit(child, path, in_list=in_list)
        # A container has no forward that could acquire a unit, so its parent takes the rest.
        if _is_container(module):
            return left
        self.groups[mine] = (prefix, left)
        return []

    def visit(self, module: nn.Module, path: str, in_list: bool) -> list[Stored]:
        nbytes = self.nbytes(module)
        fits = nbytes <= self.unit_size
        if in_list and self.is_block(module) and fits:
            self.whole(module, path)
            return []
        if in_list and not fits and next(module.children(), None) is not None:
            return self.open(module, path)
        # Blocks become units of their own, however small the subtree is, since forward runs one after the other.
        if _is_container(module) or self.holds_blocks(module):
            return self.open(module, path)
        if nbytes < self.unit_size // _CRUMB:
            return self.claim(module, path, recurse=True)
        if fits or next(module.children(), None) is None:
            self.whole(module, path)
            return []
        return self.open(module, path)


def unit_size_of(asked: int | Literal["auto"], model: nn.Module, width: int | None, device_nbytes: int) -> int:
    """Return the unit size in bytes; "auto" (`infinity.unit_size`) is resolved.

    width: as of `discover`. device_nbytes: `DeviceInfo.usable`.
    """
    if asked != "auto":
        return asked
    walk = _Walk(model, UNIT_SIZE, width)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    largest = max((walk.nbytes(block) for blocks in lists for block in blocks), default=0)
    return max(UNIT_SIZE, min(largest, device_nbytes // _UNITS_ON_DEVICE))


def discover(
    model: nn.Module,
    unit_size: int,
    width: int | None = None,
    compute: torch.dtype | None = None,
    whole: Collection[int] = (),
    *,
    codes: bool = False,
) -> list[UnitParameters]:
    """Return the units of `model` in the order of the module tree.

    unit_size: in bytes. width: bytes per element in training; by default the item size of the present dtype. compute:
    the engine's dtype, which inner tensors do not take. whole: ids of parameters that rules in Python update. These,
    frozen parameters, and parameters of another dtype, in the same subtree form units of their own. codes: so do frozen
    parameters with a code.
    """
    walk = _Walk(model, unit_size, width)
    remaining = walk.open(model, "")
    if remaining:
        walk.groups.append(("", remaining))
    return [unit for name, members in walk.groups for unit in _split(walk, name, members, compute, whole, codes=codes)]


def _split(
    walk: _Walk, root: str, members: list[Stored], compute: torch.dtype | None, whole: Collection[int], *, codes: bool
) -> Iterator[UnitParameters]:
    kinds: dict[tuple[bool, torch.dtype, bool, bool, bool], list[Stored]] = {}
    # A unit is one flat tensor with one kind of states and one code, so dtypes and frozen parameters are apart.
    for each in members:
        dtype = each.tensor.dtype
        is_code = walk.keeps_dtype(each)
        keeps = is_code and dtype.is_floating_point and compute not in (None, dtype)
        coded = codes and not is_code and _has_code(each.parameter)
        kind = each.tensor.requires_grad, dtype, keeps, id(each.parameter) in whole, coded
        kinds.setdefault(kind, []).append(each)
    for position, ((trainable, dtype, keeps, by_parameter, coded), entries) in enumerate(kinds.items()):
        called = "inner" if keeps else "coded" if coded else "frozen"
        if trainable:
            called = "by parameter" if by_parameter else "trainable"
        suffix = "" if position == 0 else f" ({called} {str(dtype).split('.')[-1]})"
        yield UnitParameters(
            name=own_name(root or "(root)") + suffix,
            root=root,
            names=tuple(own_name(each.name) for each in entries),
            parameters=tuple(each.tensor for each in entries),  # type: ignore[misc]
            wrappers=tuple(dict.fromkeys(each.parameter for each in entries if is_wrapper(each.parameter))),
            keeps=keeps,
            coded=coded,
        )


def _has_code(parameter: nn.Parameter) -> bool:
    """Return whether `infinity.frozen` stores a parameter in a code: frozen, and a matrix or larger.

    Norms and biases stay exact: they are small, and their errors reach every row.
    """
    return not parameter.requires_grad and parameter.dtype in CODED_DTYPES and parameter.dim() > 1


def modules_to_hook(model: nn.Module, unit_of: dict[int, int], roots: Sequence[str]) -> dict[nn.Module, list[int]]:
    """Return module → indices of the units that its forward acquires, in order.

    unit_of: id(stored tensor) → unit index. roots: for each unit, the path of its module. A module that holds
    a parameter of a unit elsewhere (tied weights) acquires that unit only during its own forward. Wrappers made by
    `torch.compile` are replaced by the module inside, whose forward is called in any case.
    """
    hooked: dict[nn.Module, list[int]] = {}
    stands_at = [model.get_submodule(root) for root in roots]
    owners = set(stands_at)
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, owner: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if module in owners and not _is_container(module):
            owner = module
        held = (id(each.tensor) for each in named_stored(module, recurse=False))
        units = [unit_of[key] for key in held if key in unit_of]
        # A weight tied to another subtree is acquired by the module that uses it, not by all of its parents.
        user = owner if all(stands_at[unit] is owner for unit in units) else module
        for unit in units:
            needed = hooked.setdefault(uncompiled(user), [])
            if unit not in needed:
                needed.append(unit)
        for child in module.children():
            visit(child, owner)

    visit(model, model)
    return hooked


@dataclass(frozen=True)
class ModelUnits:
    """The units of a model: for a plan, and with the parameters and modules themselves."""

    discovered: Discovered
    parameters: tuple[UnitParameters, ...]
    needed: Mapping[nn.Module, Sequence[int]]
    """Module → units (indices) that its forward acquires, in order."""

    def in_order(self, layouts: Sequence[UnitLayout]) -> list[UnitParameters]:
        """Return the parameters of each unit in the order of its slots."""
        ordered = []
        for unit, layout in zip(self.parameters, layouts, strict=True):
            by_name = dict(zip(unit.names, unit.parameters, strict=True))
            names = tuple(slot.name for slot in layout.slots)
            ordered.append(replace(unit, names=names, parameters=tuple(by_name[name] for name in names)))
        return ordered


def discover_model(
    model: nn.Module,
    unit_size: int,
    groups: Sequence[Mapping[str, object]],
    rules: Sequence[ParameterRule | None] = (),
    *,
    dtype: torch.dtype | None,
    copies: Callable[[nn.Parameter], int],
    codes: bool = False,
) -> ModelUnits:
    """Find the units of `model` and the modules that need them.

    unit_size: in bytes. groups: param_groups. rules: the rule in Python of each group; None: a native one, as all are
    without `rules`. dtype: dtype of floating parameters in the engine; None: their own. copies: parameter →
    `Member.copies`. codes: as of `discover`.
    """
    group_of = {
        id(p): number
        for number, group in enumerate(groups)
        for p in group["params"]  # type: ignore[attr-defined]
        if p.requires_grad
    }
    records: dict[int, Record] = {}
    names = {id(p): own_name(name) for name, p in model.named_parameters()} if any(rules) else {}
    for group, rule in zip(groups, rules, strict=False):
        for p in group["params"] if rule is not None else ():  # type: ignore[attr-defined]
            if rule is not None and p.requires_grad:
                has_master = (dtype or p.dtype) != torch.float32
                own = {"name": names[id(p)], "attributes": vars(p)}
                records[id(p)] = rule.record(tuple(local(p).shape), group, has_master=has_master, **own)
    width = dtype.itemsize if dtype else None
    found = discover(model, unit_size, width, dtype, records.keys(), codes=codes)
    units = tuple(
        DiscoveredUnit(
            unit.name,
            unit.dtype,
            unit.trainable,
            tuple(
                Member(name, tuple(local(p).shape), group_of.get(id(p), -1), copies(p), records.get(id(p)))
                for name, p in zip(unit.names, unit.parameters, strict=True)
            ),
            unit.coded,
            unit.keeps,
        )
        for unit in found
    )
    index_of = {id(p): index for index, unit in enumerate(found) for p in unit.parameters}
    needed = modules_to_hook(model, index_of, [unit.root for unit in found])
    described = Discovered(units, frozenset(held_together(model, needed)), frozenset(blocks(model, index_of)))
    return ModelUnits(described, tuple(found), needed)

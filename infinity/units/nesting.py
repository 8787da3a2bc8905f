"""Finds the units held at once, since a module holds its units while its submodules run, and those of a block. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


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

    unit_of: id(parameter) → unit index.
    """

    def units(module: nn.Module) -> frozenset[int]:
        return frozenset(unit_of[id(p)] for p in module.parameters() if id(p) in unit_of)

    def entries(module: nn.Module) -> list[nn.Module]:
        lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
        return [entry for each in lists for entry in each.children()]

    return {units(entry) for entry in entries(model) if not any(units(inner) for inner in entries(entry))}

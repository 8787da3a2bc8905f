"""Which units are held at once: a module holds its units while the modules below it run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


def held_together(model: nn.Module, needed: Mapping[nn.Module, Sequence[int]]) -> set[frozenset[int]]:
    """The units on each path from `model` down to a module without children.

    needed: a module → the units that its forward acquires, as `modules_to_hook` gives them. A module that calls another
    which is not below it in the tree holds its units for longer; that is not seen here.
    """
    found: set[frozenset[int]] = set()
    seen: set[tuple[nn.Module, frozenset[int]]] = set()

    def visit(module: nn.Module, above: frozenset[int]) -> None:
        if (module, above) in seen:  # a shared module, met on another path with the same units
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

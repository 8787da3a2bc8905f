"""Gradients that wait for a later piece of their micro-batch's backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from infinity.errors import ModelError


class HeldGradients:
    """Gradients of units in several pieces of a micro-batch's backward, held until the last of these pieces.

    So each unit receives the gradients of a micro-batch as in an undivided backward: together, and summed for each
    parameter in the order of the pieces, in the dtype in which autograd sums.
    """

    def __init__(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """pieces: unit → the pieces, numbered in the order of backward, in which it receives gradients."""
        self._last = {unit: max(numbers) for unit, numbers in pieces.items()}
        self._shared = {unit for unit, numbers in pieces.items() if len(set(numbers)) > 1}
        self._pieces = {unit: frozenset(numbers) for unit, numbers in pieces.items()}
        self._present = (0, 0)
        self._held: dict[int, dict[int, dict[int, torch.Tensor]]] = {}
        """micro-batch → unit → slot → gradient."""

    def begin(self, micro_batch: int, piece: int) -> None:
        """Begin the backward of a piece."""
        self._present = micro_batch, piece

    def take(self, unit: int, slot: int, gradient: torch.Tensor, name: str) -> bool:
        """Keep a gradient that has arrived. Returns False if its unit is in this piece only. name: the parameter's."""
        micro_batch, piece = self._present
        if piece not in self._pieces.get(unit, ()):
            raise ModelError(
                f"{name} received a gradient in another part of backward than the graph of the model shows, as in a "
                "backward inside of a backward. Leave blocks out of engine.train_batch()."
            )
        if unit not in self._shared:
            return False
        slots = self._held.setdefault(micro_batch, {}).setdefault(unit, {})
        before = slots.get(slot)
        if before is not None:
            gradient = before + gradient if before.layout is torch.strided else gradient + before
        slots[slot] = gradient
        return True

    @property
    def is_due(self) -> bool:
        """Return whether gradients wait for the end of the present piece."""
        micro_batch, piece = self._present
        return any(self._last[unit] == piece for unit in self._held.get(micro_batch, ()))

    def due(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Remove and yield (unit, slot, gradient) of the units whose last piece is the present one."""
        micro_batch, piece = self._present
        units = self._held.get(micro_batch, {})
        for unit in [unit for unit in units if self._last[unit] == piece]:
            for slot, gradient in units.pop(unit).items():
                yield unit, slot, gradient

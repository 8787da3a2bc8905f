"""Draws the micro-batches of a step, and computes their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from infinity.errors import UsageError

LossFunction = Callable[[Any, Any], torch.Tensor]
"""(output of the model, micro-batch) → loss."""


def draw(batches: Iterator[Any], count: int) -> list[Any]:
    """Draw the micro-batches of a step. Raises UsageError if there are fewer, or if one was written over another."""
    if not isinstance(batches, Iterator):
        raise UsageError(
            f"engine.train_batch() takes an iterator, which continues in the next step, not a "
            f"{type(batches).__name__}: pass iter(loader), made once"
        )
    drawn: list[Any] = []
    contents: list[_Contents] = []
    for batch in batches:
        drawn.append(batch)
        if len(drawn) < count:
            contents.append(_Contents(batch))
            continue
        if any(each.changed() for each in contents):
            raise UsageError(
                "the iterator of engine.train_batch() wrote a micro-batch over an earlier one of the same step. All of "
                "them are drawn before the first one runs: yield new tensors and containers, or copies (clone())."
            )
        return drawn
    raise UsageError(
        f"the iterator of engine.train_batch() ended after {len(drawn)} of {count} micro-batches "
        "(gradient_accumulation_steps). Nothing was run: make a new iterator for the next epoch, or repeat the data."
    )


class _Contents:
    """The leaves of a micro-batch, and copies of its tensors: numpy and other processes write without a version."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._leaves = _leaves(batch)
        self._copies = [(tensor, tensor.clone()) for tensor in _tensors(self._leaves)]

    def changed(self) -> bool:
        present = _leaves(self._batch)
        if len(present) != len(self._leaves) or any(a is not b for a, b in zip(present, self._leaves, strict=True)):
            return True
        return any(not torch.equal(_bits(tensor), _bits(copy)) for tensor, copy in self._copies)


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return tree_leaves(dict(batch))  # of transformers' BatchEncoding, which is no dict
    if type(batch).__module__ != "builtins" and isinstance(getattr(batch, "__dict__", None), dict):
        return [*tree_leaves(batch), *tree_leaves(vars(batch))]
    return tree_leaves(batch)


def _tensors(leaves: list[Any]) -> Iterator[torch.Tensor]:
    for leaf in leaves:
        if hasattr(leaf, "__array_interface__") and not isinstance(leaf, torch.Tensor):
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            yield leaf.detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def loss_of(model: Callable[..., Any], batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Return the loss of a batch."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    if loss_fn is not None:
        return loss_fn(output, batch)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    elif not isinstance(output, torch.Tensor):
        output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return output  # type: ignore[no-any-return]

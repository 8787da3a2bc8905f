"""Draws the micro-batches of a step, and computes their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from infinity.engine.model_state import ModelState
from infinity.errors import UsageError

LossFunction = Callable[[Any, Any], torch.Tensor]
"""(output of the model, micro-batch) → loss."""


def draw(batches: Iterator[Any], count: int) -> list[Any]:
    """Draw the micro-batches of a step. Raises UsageError if there are fewer."""
    if not isinstance(batches, Iterator):
        raise UsageError(
            f"engine.train_batch() takes an iterator, which continues in the next step, not a "
            f"{type(batches).__name__}: pass iter(loader), made once"
        )
    drawn: list[Any] = []
    states: list[ModelState] = []
    for batch in batches:
        drawn.append(batch)
        if len(drawn) < count:
            states.append(ModelState(batch, by_value=True))
            continue
        if any(state.changed() for state in states):
            raise UsageError(
                "the iterator of engine.train_batch() wrote a micro-batch over an earlier one of the same step. All of "
                "them are drawn before the first one runs: yield new tensors and containers, or copies (clone())."
            )
        return drawn
    raise UsageError(
        f"the iterator of engine.train_batch() ended after {len(drawn)} of {count} micro-batches "
        "(gradient_accumulation_steps). Nothing was run: make a new iterator for the next epoch, or repeat the data."
    )


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

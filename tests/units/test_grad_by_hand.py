"""`.grad` in the user's own code raises an error where the engine has taken a gradient that a plain loop would see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import OpenEngine
from infinity.errors import UsageError
from support.loops import train
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(4)


def set_to_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def delete(model: nn.Module) -> None:
    for parameter in model.parameters():
        del parameter.grad


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


BY_HAND: list[Callable[[nn.Module], object]] = [
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    lambda model: model.zero_grad(),
    set_to_none,
    delete,
    scale,
]


@pytest.mark.parametrize("by_hand", BY_HAND)
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_is_refused_between_backward_and_step(
    by_hand: Callable[[nn.Module], object], update: str, make_engine: OpenEngine
) -> None:
    """The error names the alternatives, and the step continues unharmed."""
    engine = make_engine(seeded(Linears), update=update)
    engine.backward(engine(*BATCHES[0]))
    with pytest.raises(UsageError, match=r"\.grad was .*gradient_clipping.*get_full_grad"):
        by_hand(engine.module)
    engine.step()
    train(engine, BATCHES)


@pytest.mark.parametrize("by_hand", [each for each in BY_HAND if each is not BY_HAND[1]])
def test_is_harmless_where_there_is_no_gradient(
    by_hand: Callable[[nn.Module], object], make_engine: OpenEngine
) -> None:
    """`.grad` may be cleared before the first step, after each, and after `drop_gradients`, as `zero_grad` does.

    torch's `clip_grad_value_` is left out: it raises an error of its own if there is no gradient.
    """
    engine, expected = (make_engine(seeded(Linears), update="next_forward") for _ in range(2))
    by_hand(engine.module)
    losses = []
    for batch in BATCHES:
        losses += train(engine, [batch])
        by_hand(engine.module)
    assert losses == train(expected, BATCHES)
    engine.backward(engine(*BATCHES[0]))
    engine.drop_gradients()
    by_hand(engine.module)


def test_a_gradient_that_is_set_by_hand_is_refused(make_engine: OpenEngine) -> None:
    """Gradients set by hand, as in evolution strategies, raise an error: the engine would not use them."""
    engine = make_engine(seeded(Linears))
    parameter = next(engine.module.parameters())
    with pytest.raises(UsageError, match="set by hand"):
        parameter.grad = torch.ones_like(parameter)


def test_a_hook_that_needs_the_sum_of_micro_batches_is_refused(make_engine: OpenEngine) -> None:
    """Post-accumulate hooks that read the sum of micro-batches, as a plain loop allows, raise an error."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model = seeded(Linears)
    next(model.parameters()).register_post_accumulate_grad_hook(halve)
    engine = make_engine(model, accumulation=2)
    engine.backward(engine(*BATCHES[0]))
    with pytest.raises(UsageError, match=r"\.grad was read"):
        engine.backward(engine(*BATCHES[1]))


def test_a_hook_that_takes_the_gradient_leaves_none(make_engine: OpenEngine) -> None:
    """A parameter whose hook clears `.grad` is not updated, as in a plain loop."""

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model = seeded(Linears)
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(take)
    before = first.detach().clone()
    engine = make_engine(model)
    train(engine, BATCHES)
    assert torch.equal(first, before)

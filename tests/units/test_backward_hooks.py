"""Hooks of the user that run in backward: what they see, and edits of parameters in them, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import OpenEngine
from infinity.errors import UsageError
from infinity.units.compiled import written
from support.lifetime import assert_trains_like_plain
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(6)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"update": "next_forward"}, {"accumulation": 2}, {"param": "none", "optim": "none"}, {"clip": 0.1}],
    ids=["nvme", "next forward", "accumulation", "memory", "clip"],
)


def apply(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def apply_to_data(parameter: torch.Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def apply_to_many(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_add_([parameter], [parameter.grad], alpha=-0.1)
    parameter.grad = None


def in_backward(update: Callable[[torch.Tensor], None], every: int) -> Callable[[], nn.Module]:
    """Return a constructor of a model whose every so many-th layer has an optimizer in backward."""

    def make() -> nn.Module:
        model = Linears(bias=True)
        for layer in list(model.layers)[::every]:
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(update)
        return model

    return make


def with_other_edits() -> nn.Module:
    """A tensor hook that edits another parameter, and a module hook that edits the module's own."""
    model = Linears(bias=True)
    layers = list(model.layers)

    def shift(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            layers[5].bias.add_(gradient, alpha=-0.1)

    def decay(module: nn.Module, _: Any, __: Any) -> None:
        with torch.no_grad():
            module.bias.mul_(0.9)

    layers[1].bias.register_hook(shift)
    layers[3].register_full_backward_hook(decay)
    return model


@OPTIONS
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("update", [apply, apply_to_data, apply_to_many])
def test_an_optimizer_in_backward(update: Callable[[torch.Tensor], None], every: int, options: dict[str, Any]) -> None:
    """A hook that updates its parameter and clears the gradient, of some or of all parameters."""
    assert_trains_like_plain(in_backward(update, every), BATCHES, units=8, unit_size=2500, **options)


@OPTIONS
def test_edits_of_other_parameters(options: dict[str, Any]) -> None:
    assert_trains_like_plain(with_other_edits, BATCHES, units=8, unit_size=2500, **options)


def test_a_sum_over_micro_batches_is_not_shown(make_engine: OpenEngine) -> None:
    """In a plain loop the hook would see the sum, which the engine keeps elsewhere."""
    model = seeded(Linears)
    seen: list[float] = []
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    engine = make_engine(model, accumulation=2)
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    with pytest.raises(
        UsageError, match=r"layers\.1\.weight\.grad was read in a backward, .* of the present backward only"
    ):
        engine.backward(engine(*BATCHES[1]))
    assert len(seen) == 1


def test_a_hook_registered_after_the_engines(make_engine: OpenEngine) -> None:
    """The engine has taken the gradient when it runs."""
    engine = make_engine(seeded(Linears))
    engine.module.layers[1].weight.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    with pytest.raises(UsageError, match=r"only if it was registered before infinity\.initialize"):
        engine.backward(engine(*BATCHES[0]))


def test_a_backward_without_gradients_is_no_micro_batch(make_engine: OpenEngine) -> None:
    """`torch.autograd.grad` after a backward whose gradients a hook has cleared."""
    engine = make_engine(seeded(in_backward(apply, 1)))
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    x = BATCHES[0][0].clone().requires_grad_()
    torch.autograd.grad(engine(x, BATCHES[0][1]), x)
    with pytest.raises(UsageError, match="without a backward before it"):
        engine.step()


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "found"),
    [
        (torch.Tensor.add_, "ab", {}, "a"),
        (torch.Tensor.add, "ab", {}, ""),
        (torch.Tensor.__iadd__, "ab", {}, "a"),
        (torch.Tensor.__setitem__, "ab", {}, "a"),
        (torch.Tensor.__ior__, "ab", {}, "a"),
        (torch.Tensor.__int__, "a", {}, ""),
        (torch.Tensor.__index__, "a", {}, ""),
        (torch.Tensor.__invert__, "a", {}, ""),
        (torch.Tensor.__getitem__, "ab", {}, ""),
        (torch.Tensor.data.__set__, "ab", {}, "a"),  # type: ignore[attr-defined]
        (torch.Tensor.data.__get__, "a", {}, ""),  # type: ignore[attr-defined]
        (torch.add, "ab", {"out": "c"}, "c"),
        (torch._foreach_add_, "ab", {}, "a"),
        (torch.ops.aten.add_.Tensor, "ab", {}, "a"),
        (torch.ops.aten.add.Tensor, "ab", {}, ""),
        (torch.ops.aten.add.out, "ab", {"out": "c"}, "c"),
        (torch.ops.aten.add_.Tensor, "", {"self": "a", "other": "b"}, "a"),
    ],
)
def test_operations_that_write(operation: Any, args: str, kwargs: dict[str, Any], found: str) -> None:
    assert "".join(each for each in written(operation, tuple(args), kwargs) if each) == found

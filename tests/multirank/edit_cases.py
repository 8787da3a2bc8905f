"""Code of the ranks in test_edits_in_backward.py: hooks that edit parameters, or gradients, in backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import Stack, seeded

Install = Callable[[Any], None]


def by_its_own_gradient(model: Any) -> None:
    """An optimizer in backward, for one bias."""

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_a_torch_optimizer(model: Any) -> None:
    bias = model.blocks[1].up.bias
    optimizer = torch.optim.SGD([bias], lr=0.1)
    bias.register_post_accumulate_grad_hook(lambda _: (optimizer.step(), optimizer.zero_grad()))


def by_many_at_once(model: Any) -> None:
    """`torch._foreach_add_`, as in torch's optimizers."""

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_add_([parameter], [parameter.grad], alpha=-0.1)
        parameter.grad = None

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_out(model: Any) -> None:
    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            torch.sub(parameter, parameter.grad, alpha=0.1, out=parameter)

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_item(model: Any) -> None:
    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter[0] = parameter.grad.mean()

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_assigned_data(model: Any) -> None:
    def update(parameter: torch.Tensor) -> None:
        parameter.data = parameter.detach() - 0.1 * parameter.grad

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_a_tensor_hook(model: Any) -> None:
    """`register_hook`, of another parameter."""

    def update(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            model.blocks[3].up.bias.add_(gradient, alpha=-0.1)

    model.blocks[1].up.bias.register_hook(update)


def by_a_module_hook(model: Any) -> None:
    def update(module: nn.Module, _: Any, gradients: Any) -> None:
        with torch.no_grad():
            module.bias.sub_(gradients[0].mean())

    model.blocks[1].up.register_full_backward_hook(update)


def by_a_hook_of_an_activation(model: Any) -> None:
    """Registered in each forward."""

    def update(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            model.blocks[1].up.bias.sub_(gradient.mean())

    model.blocks[2].register_forward_hook(lambda module, inputs, output: output.register_hook(update) and None)


def by_data(model: Any) -> None:
    """`.data`, which counts no edit."""

    def update(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_data_beside_the_engine(model: Any) -> None:
    """The gradient is left to the engine, too, which would update the parameter in the same backward."""

    def update(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(update)


def by_an_array(model: Any) -> None:
    def update(module: nn.Module, _: Any, gradients: Any) -> None:
        module.bias.detach().view(torch.uint8).numpy()[0] ^= 1

    model.blocks[1].up.register_full_backward_hook(update)


def by_data_of_an_unused_block(model: Any) -> None:
    """A block whose last update no forward has seen."""

    def update(gradient: torch.Tensor) -> None:
        model.blocks[4].up.bias.data.add_(gradient.mean())

    model.blocks[1].up.bias.register_hook(update)


def by_a_kept_view(model: Any) -> None:
    """A view that the script took, of a unit that may have left its buffer when the hook runs."""
    view = model.blocks[5].up.bias.data

    def update(gradient: torch.Tensor) -> None:
        view.add_(gradient, alpha=-0.1)

    model.blocks[1].up.bias.register_hook(update)


BEFORE: dict[str, Install] = {
    each.__name__: each
    for each in (
        *(by_its_own_gradient, by_many_at_once, by_out, by_item, by_assigned_data),
        *(by_a_tensor_hook, by_a_module_hook, by_a_hook_of_an_activation),
    )
}
"""Edits that are refused before they happen."""
AFTER: dict[str, Install] = {each.__name__: each for each in (by_data, by_data_beside_the_engine, by_an_array)}
"""Edits that are found once they have happened."""
ALL = {
    **BEFORE,
    **AFTER,
    **{each.__name__: each for each in (by_a_torch_optimizer, by_a_kept_view, by_data_of_an_unused_block)},
}


def reading(model: Any) -> None:
    """Hooks that read and change gradients, as in DistributedDataParallel, and read parameters."""
    seen: list[float] = []

    def scale(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.data.norm() + (parameter * 2).sum()))
        seen.append(float(model.blocks[4].up.weight.detach().sum()))
        parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)

    model.blocks[1].up.bias.register_post_accumulate_grad_hook(scale)
    model.blocks[2].up.weight.register_hook(lambda gradient: gradient * 0.5)
    model.blocks[3].up.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 0.5,))


class Skipping(Stack):
    """Skips a block in every second forward, also of an evaluation."""

    calls = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        skipped = self.blocks[4]
        self.run = lambda block, x: x if block is skipped and self.calls % 2 == 0 else block(x)
        return super().forward(tokens, targets)


def edited(
    rank: int, *, how: str, folder: str, late: bool = False, skips: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the error of the first step with hooks that edit, and of the next call; parameters if it can be called.

    late: register the hooks after the construction of the engine. skips: after a step, which the one with hooks follows
    that skips a block.
    """
    model = seeded(Skipping if skips else Stack)
    if not late:
        ALL[how](model)
    tokens = part(next(iter(global_batches(1, 2 * SAMPLES))), rank)
    with (
        warnings.catch_warnings(),
        open_engine(model, engine_config(**{"folder": folder, "micro": SAMPLES, **options})) as engine,
    ):
        if skips:
            engine.backward(engine(*tokens))
            engine.step()
        before = {} if skips else parameters_of(engine)
        if late:
            ALL[how](model)
        warnings.filterwarnings("ignore", "something still refers")  # a kept view
        try:
            engine.backward(engine(*tokens))
            engine.step()
        except InfinityError as error:
            first = str(error)
        else:
            return {"first": None}
        try:
            engine(*tokens)
        except InfinityError as error:
            return {"first": first, "next": str(error)}
        after = parameters_of(engine)
        return {"first": first, "next": None, "kept": all(torch.equal(after[n], v) for n, v in before.items())}


def ruled(rank: int, *, ranks: int = 2, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train biases by a rule of the loop's own, outside of backward. Returns the losses and the parameters."""
    model = seeded(Stack)
    biases = [block.up.bias for block in model.blocks]
    others = [p for p in model.parameters() if all(p is not bias for bias in biases)]
    config = engine_config(**{"micro": 2 * SAMPLES // ranks, "update": "next_forward", "optimizer": "SGD", **options})
    losses = []
    with infinity.initialize(model, config, others, device=CpuDevice())[0] as engine:
        for batch in global_batches(4, 2 * SAMPLES):
            loss = engine(*(part(batch, rank) if ranks > 1 else batch))
            engine.backward(loss)
            with torch.no_grad():
                for bias in biases:
                    bias.sub_(infinity.get_full_grad(bias), alpha=0.5)
            engine.step()
            losses.append(loss.item())
        return losses, parameters_of(engine)


def read(rank: int, *, folder: str, ranks: int = 2, skips: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train with hooks of `reading`; several ranks each take a micro-batch of those of one rank."""
    model = seeded(Skipping if skips else Stack)
    reading(model)
    with open_engine(model, engine_config(**{"folder": folder, "micro": 2 * SAMPLES // ranks, **options})) as engine:
        for batch in global_batches(4, 2 * SAMPLES):
            engine.backward(engine(*(part(batch, rank) if ranks > 1 else batch)))
            engine.step()
            with torch.no_grad():  # edits between steps are no edits in backward
                model.blocks[1].up.bias.mul_(0.9)
                model.blocks[2].up.bias.data.mul_(0.9)
        return parameters_of(engine)

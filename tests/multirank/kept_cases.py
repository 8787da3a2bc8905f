"""Cases for the processes of a `support.ranks.Group`: kept parameters and views, and edits of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import infinity
from infinity.errors import LifetimeError
from infinity.units.residents import owner_of
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine, parameters_of
from support.models import seeded, vector_batches

STEPS = 4
LEARNING_RATE = 1e-2


class Layer(nn.Module):
    """A layer. hooks: install saved-tensor hooks around the product. edit: edits the weight in each forward."""

    def __init__(self, edit: Callable[[torch.Tensor], None] | None = None, hooks: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.edit, self.hooks = edit, hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            self.edit(self.weight)
        if self.hooks:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return x + 0.3 * torch.tanh(F.linear(x, self.weight))
        return x + 0.3 * torch.tanh(F.linear(x, self.weight))


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


class KeepsView(torch.autograd.Function):
    """x @ weight that keeps a view of its weight on `ctx`, which autograd knows nothing of. between: called in backward
    before the view is read. copies: keep a copy of the view instead.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, between: Callable[[], None], copies: bool
    ) -> torch.Tensor:
        ctx.view, ctx.between = weight.t().clone() if copies else weight.t(), between
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.between()
        return gradients[0] @ ctx.view, None, None, None


class Twice(Net):
    """A net that uses all its weights once more, before the layers and without a gradient. In backward the gradients of
    the layers have all arrived before these uses read the views that they keep, for the gradient of `first`.

    echoed: the layers that are used twice.
    """

    def __init__(self, between: Callable[[], None], copies: bool, echoed: slice = slice(None)) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(32))
        self._between, self._copies, self._echoed = between, copies, echoed

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x + self.first
        for layer in self.layers[self._echoed]:
            x = x + 0.3 * torch.tanh(KeepsView.apply(x, layer.weight.detach(), self._between, self._copies))
        return super().forward(x, targets)


def clamp(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-0.3, 0.3)


def shrink_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.98)


def shrink_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] *= 0.98


EDITS: dict[str, Callable[[torch.Tensor], None]] = {
    "in place": clamp,
    "data": shrink_data,
    "numpy": shrink_numpy,
}

After = Callable[[Any, int], Any]


def full(weight: nn.Parameter) -> torch.Tensor:
    """The state of a parameter, of an engine's or of a plain model's."""
    return weight.detach() if owner_of(weight) is None else infinity.get_full_fp32_param(weight)


def views_of(model: Any) -> list[Any]:
    layers = model.layers
    return [layers[0].weight.data, layers[2].weight.detach()[3], layers[4].weight.detach().numpy()]


def story_of(name: str, model: Any, rank: int) -> After:
    """Return the function to call after each step. It is the same on all ranks, except in "views of one rank"."""
    kept = [layer.weight for layer in model.layers]
    taken: list[Any] = []

    def views(model: Any, number: int) -> Any:
        if number == 0:
            taken.extend(views_of(model))
        return [float(view.sum()) for view in taken]

    def views_of_one_rank(model: Any, number: int) -> Any:
        if number == 1:
            taken.extend(views_of(model) if rank == 1 else [float(view.sum()) for view in views_of(model)])
        return [float(view.sum()) for view in taken] if rank == 1 else None

    def edited_views(model: Any, number: int) -> Any:
        if number == 0:
            taken.extend(views_of(model))
        taken[0].mul_(0.98)
        taken[1].zero_()
        taken[2][...] *= 0.97
        return [float(view.sum()) for view in taken]

    def edited_views_later(model: Any, number: int) -> Any:
        """Edit the views after a forward without gradients has evicted their units."""
        if number == 0:
            taken.extend(views_of(model))
        with torch.no_grad():
            model(torch.zeros(4, 32), torch.zeros(4, 32))
        return edited_views(model, 1)

    def dropped_views(model: Any, number: int) -> Any:
        """Views that are written to while their units are released, and gone before these are fetched."""
        views = [layer.weight.data for layer in model.layers]
        with torch.no_grad():
            model(torch.zeros(4, 32), torch.zeros(4, 32))
        for view in views:
            view.mul_(0.98)
        views.clear()
        return [full(weight)[3].sum().item() for weight in kept] + [weight.detach().clone() for weight in kept[:2]]

    def undone_views(model: Any, number: int) -> Any:
        """Edits that reach the tiers from buffers that are kept, and are undone in those that are fetched."""
        views = [layer.weight.data for layer in model.layers]
        values = [view.clone() for view in views]
        with torch.no_grad():
            model(torch.zeros(4, 32), torch.zeros(4, 32))
        for view in views:
            view.zero_()
        seen = [full(weight)[3].sum().item() for weight in kept]
        for weight, value in zip(kept, values, strict=True):
            weight.detach().copy_(value)
        return seen + [full(weight)[3].sum().item() for weight in kept]

    def parameters(model: Any, number: int) -> Any:
        for weight in kept[1:4]:
            shrink_data(weight)
        clamp(kept[number])
        return [float(weight.detach().sum()) for weight in kept]

    def freezing(model: Any, number: int) -> Any:
        model.layers[2].requires_grad_(number % 2 == 1)
        model.layers[0].requires_grad_(number % 3 == 1)
        return [float(weight.detach().sum()) for weight in kept]

    def nothing(model: Any, number: int) -> None:
        return None

    stories: dict[str, After] = {
        "views": views,
        "views of one rank": views_of_one_rank,
        "edited views": edited_views,
        "edited views, later": edited_views_later,
        "dropped views": dropped_views,
        "undone views": undone_views,
        "parameters": parameters,
        "freezing": freezing,
        "nothing": nothing,
    }
    return stories[name]


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return vector_batches(STEPS, batch=SAMPLES, seed=7 + rank)


def reported(
    rank: int,
    *,
    story: str,
    folder: str,
    edit: str = "",
    hooks: bool = False,
    leaks: bool = True,
    twice: str = "",
    echoed: slice = slice(None),
    late: bool = False,
    prefetch_bytes: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Return this rank's losses, the story's results and all final parameters.

    twice: train a model that uses its weights, or the `echoed` ones, twice and keeps views on "all ranks" or on "one
    rank". late: on a device whose copies complete late.
    """

    def make() -> nn.Module:
        if twice:
            return Twice(let_moves_end, copies=twice == "one rank" and rank == 0, echoed=echoed)
        return Net(edit=EDITS.get(edit), hooks=hooks)

    def let_moves_end() -> None:
        for unit in engine.units:
            if unit.update is not None:
                unit.update.done.wait()
            if unit.transfer is not None:
                unit.transfer.wait()

    warnings.filterwarnings("ignore", "something still refers")
    try:
        config = engine_config(
            folder=folder, micro=SAMPLES, lr=LEARNING_RATE, unit_size=4096, prefetch_bytes=prefetch_bytes, **options
        )
        with open_engine(seeded(make), config, LateDevice() if late else None) as engine:
            after = story_of(story, engine.module, rank)
            losses, seen = [], []
            for number, batch in enumerate(batches(rank)):
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                seen.append(after(engine.module, number))
            del loss
            values = parameters_of(engine)
            if not leaks:
                assert_nothing_leaked(engine)
        return {"losses": losses, "seen": seen, "values": values}
    finally:
        warnings.filterwarnings("error", "something still refers to the parameters of unit", UserWarning)


def edits_before_the_step(rank: int, *, folder: str) -> str:
    """Return the error of a step after an edit through a view whose unit was updated in backward; "" without one."""
    warnings.filterwarnings("ignore", "something still refers")
    try:
        config = engine_config(folder=folder, micro=SAMPLES, unit_size=4096, prefetch_bytes=0, update="during_backward")
        engine = open_engine(seeded(Net), config)
        view = engine.module.layers[3].weight.data
        try:
            for number, batch in enumerate(batches(rank)):
                engine.backward(engine(*batch))
                if number == 2:
                    view.mul_(0.98)
                engine.step()
        except LifetimeError as error:
            return str(error)
        finally:
            engine.close()
        return ""
    finally:
        warnings.filterwarnings("error", "something still refers to the parameters of unit", UserWarning)


def shown_after_a_load(rank: int, *, folder: str, viewers: list[int], **options: Any) -> bool:
    """Return whether views of the ranks `viewers` show the values of a checkpoint once it is loaded."""
    config = engine_config(folder=folder, micro=SAMPLES, unit_size=4096, **options)
    with open_engine(seeded(Net), config) as engine:
        engine.save_checkpoint(f"{folder}/saved")
        expected = parameters_of(engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "something still refers")
        with open_engine(seeded(Net, seed=2), config) as engine:
            views = {name: p.view(-1) for name, p in engine.module.named_parameters()}
            if rank not in viewers:
                views.clear()
            engine.load_checkpoint(f"{folder}/saved")
            return all(torch.equal(view, expected[name].view(-1)) for name, view in views.items())


def plain(
    ranks: int,
    *,
    story: str,
    edit: str = "",
    twice: str = "",
    echoed: slice = slice(None),
    make: Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """Return the same from plain PyTorch, with the gradient averaged over the ranks' batches. make: of another model
    with `layers`.
    """

    def usual() -> nn.Module:
        return Twice(lambda: None, copies=False, echoed=echoed) if twice else Net(edit=EDITS.get(edit))

    model: Any = seeded(make or usual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    after = story_of(story, model, 1)
    losses, seen = [], []
    every = [batches(rank) for rank in range(ranks)]
    for number in range(STEPS):
        # Every rank edits in its forward; one model must edit once.
        states = [parameter.detach().clone() for parameter in model.parameters()]
        of_ranks = []
        for rank in range(ranks):
            with torch.no_grad():
                for parameter, state in zip(model.parameters(), states, strict=True):
                    parameter.copy_(state)
            loss = model(*every[rank][number])
            (loss / ranks).backward()
            of_ranks.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks)
        seen.append(after(model, number))
    return {"losses": losses, "seen": seen, "values": {n: p.detach() for n, p in model.named_parameters()}}

"""Parameters and views kept beyond the forward that read them have the present values."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from conftest import OpenEngine
from infinity.errors import InfinityError
from infinity.units.unit import Residency
from support.beside import LATE_TOO, NVME, PLACES, SCHEDULES, assert_same_story, training
from support.loops import train
from support.models import seeded, vector_batches

BATCHES = vector_batches(5)

viewed = pytest.mark.filterwarnings("ignore:something still refers")


class KeepsWeight(torch.autograd.Function):
    """x @ weight.t() that keeps the Parameter on `ctx`, in a list, in a dict and in a closure."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        if how == "attribute":
            ctx.find = weight
        elif how == "list":
            ctx.found = [weight]
        elif how == "dict":
            ctx.found = {"w": weight}
        else:
            ctx.found = lambda: weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        found = getattr(ctx, "found", None)
        if isinstance(found, list):
            (weight,) = found
        elif isinstance(found, dict):
            weight = found["w"]
        else:
            weight = ctx.find if found is None else found()
        return gradients[0] @ weight, gradients[0].t() @ x, None


Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, apply: Apply | None = None, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.apply_ = apply or F.linear
        self.flat: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(self.apply_(x, self.weight) + self.bias)


class Net(nn.Module):
    def __init__(self, apply: Apply | None = None, layer: Callable[..., nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(apply) for _ in range(6))
        self.kept = [layer.weight for layer in self.layers]

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


# -- parameters ------------------------------------------------------------------------------------------------------


@LATE_TOO
@pytest.mark.parametrize("how", ["attribute", "list", "dict", "closure"])
def test_by_a_custom_function(how: str, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(lambda x, w: KeepsWeight.apply(x, w, how)), training(BATCHES), place=place, units=6)


class UsesKept(Net):
    """Adds terms with kept weights. since: "init" or "first forward", when they were read."""

    def __init__(self, since: str) -> None:
        super().__init__()
        self.since = since
        self.first: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.first:
            self.first = [layer.weight for layer in self.layers]
        loss = super().forward(x, targets)
        weights = self.kept if self.since == "init" else self.first
        for one, other in itertools.pairwise(weights):
            loss = loss + 0.01 * (one @ other).square().mean() + 0.01 * F.mse_loss(F.linear(x, one), x)
        return loss + 0.001 * torch.stack([w.norm() for w in weights]).sum()


@LATE_TOO
@pytest.mark.parametrize("since", ["init", "first forward"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_used_in_every_forward(since: str, clip: float, place: dict[str, Any]) -> None:
    assert_same_story(lambda: UsesKept(since), training(BATCHES), place=place, units=6, clip=clip)


@PLACES
@SCHEDULES
def test_used_in_loss_terms_comparisons_and_masks(update: str, place: dict[str, Any]) -> None:
    """Parameters read once before training can be used by the loop in every step."""

    def story(loop: Any) -> Any:
        weights = [layer.weight for layer in loop.model.layers]
        start = [w.detach().clone() for w in weights]
        seen: list[Any] = []
        for x, targets in BATCHES:
            large = [(w.abs() > 0.2).sum().item() for w in weights]
            masks = [w > 0.1 for w in weights]
            loss = loop.model(x, targets)
            loss = loss + 0.01 * sum((w - s).square().sum() for w, s in zip(weights, start, strict=True))
            loss = loss + 0.01 * sum((w * m).abs().sum() for w, m in zip(weights, masks, strict=True))
            if weights[0].max() > weights[1].max():
                loss = loss * 1.5
            loop.backward(loss)
            loop.step()
            seen += [loss.item(), large, [w[0, 0].item() for w in weights], weights[2].sum().item()]
        return seen

    assert_same_story(Net, story, place={**place, "update": update}, units=6)


def _reloaded(values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def numbers_of(weight: Any) -> dict[str, Callable[[], Any]]:
    """Return name → a way to read numbers of a parameter."""
    return {
        "as_tensor": lambda: torch.as_tensor(weight) + 1,
        "asarray": lambda: torch.asarray(weight) * 2,
        "tensor of rows": lambda: torch.tensor([row.tolist() for row in weight]),
        "numpy": lambda: torch.from_numpy(weight.detach().numpy().copy()),
        "tolist": lambda: weight.tolist(),
        "item": lambda: weight[3, 4].item(),
        "float": lambda: float(weight[1, 2]),
        "bool": lambda: bool(weight[0, 0] > 0),
        "iteration": lambda: [row.sum().item() for row in weight],
        "stack": lambda: torch.stack([weight, weight]).sum().item(),
        "cat": lambda: torch.cat([weight[None], weight[None]]).mean().item(),
        "foreach": lambda: [v.sum().item() for v in torch._foreach_mul([weight], 2.0)],
        "foreach_norm": lambda: [v.item() for v in torch._foreach_norm([weight.detach()])],
        "out": lambda: torch.add(weight.detach(), 1, out=torch.empty(32, 32)),
        "copy_": lambda: torch.empty(32, 32).copy_(weight.detach()),
        "copy_ itself": lambda: torch.no_grad()(lambda: torch.empty(32, 32).copy_(weight))(),
        "setitem": lambda: torch.zeros(2, 32, 32).index_put_((torch.tensor(1),), weight.detach()),
        "where": lambda: torch.where(weight > 0, weight, 0.0).detach(),
        "linalg": lambda: torch.linalg.svdvals(weight.detach()),
        "einsum": lambda: torch.einsum("ij,kj->ik", weight, weight).detach(),
        "allclose": lambda: torch.allclose(weight, weight),
        "equal": lambda: torch.equal(weight, weight),
        "repr": lambda: repr(weight.detach()),
        "clone": lambda: weight.clone().detach(),
        "data": lambda: weight.data.clone(),
        "to": lambda: weight.to(torch.float64).detach(),
        "ops": lambda: torch.ops.aten.sum(weight).item(),
        "ops overload": lambda: torch.ops.aten.mul.Tensor(weight, 2.0).detach(),
        "save": lambda: _reloaded({"w": weight})["w"].detach(),
        "save data": lambda: _reloaded([weight.detach()])[0],
        "pickle": lambda: pickle.loads(pickle.dumps(weight)).detach(),
        "deepcopy": lambda: copy.deepcopy(weight).detach(),
        "copy": lambda: copy.copy(weight).detach().clone(),
        "collate": lambda: torch.utils.data.default_collate([weight.detach(), weight.detach()]),
        "jvp": lambda: torch.func.jvp(lambda w: w.square().sum(), (weight.detach(),), (torch.ones(32, 32),))[1].item(),
        "grad": lambda: torch.func.grad(lambda w: w.square().sum())(weight.detach()),
        "sparse": lambda: weight.detach().to_sparse().to_dense(),
        "nested": lambda: torch.nested.nested_tensor([weight.detach(), weight.detach()[:2]]).to_padded_tensor(0.0),
        "apply": lambda: _Double.apply(weight).detach(),
        "dlpack": lambda: torch.utils.dlpack.from_dlpack(weight.detach()).clone(),
        "array": lambda: __import__("numpy").asarray(weight.detach()).sum().item(),
        "clip_grad": lambda: nn.utils.parameters_to_vector([weight]).detach().clone(),
        "storage": lambda: weight.detach().untyped_storage().nbytes() > 0,
        "functional": lambda: F.linear(torch.ones(1, 32), weight).detach(),
        "vmap": lambda: torch.vmap(lambda row: row.sum())(weight.detach()),
    }


@PLACES
@pytest.mark.parametrize("way", list(numbers_of(None)))
@viewed
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_kept_parameter_is_read_in_every_way(way: str, place: dict[str, Any]) -> None:
    """Reads of a kept parameter give its present values, never a placeholder's. Not covered are calls that bypass
    `__torch_function__`: `torch.tensor(p)`, `x.new_tensor(p)`, TorchScript functions and C++ extensions.
    """

    def story(loop: Any) -> Any:
        weight = loop.model.kept[1]
        return training(BATCHES[:2], lambda loop, number: numbers_of(weight)[way]())(loop)

    assert_same_story(Net, story, place=place, units=6, leaks=True)


# -- saved-tensor hooks of the user ----------------------------------------------------------------------------------


class Stored:
    """Saved-tensor hooks that keep tensors in a list and unpack them by index."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def hooks(self) -> Any:
        def pack(tensor: torch.Tensor) -> int:
            self.kept.append(tensor)
            return len(self.kept) - 1

        return saved_tensors_hooks(pack, lambda number: self.kept[number])


HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "list": lambda: Stored().hooks(),
    "copy": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "numpy": lambda: saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "detach": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
}
AROUND = pytest.mark.parametrize("hooks", list(HOOKS))


@LATE_TOO
@AROUND
def test_hooks_around_the_model(hooks: str, place: dict[str, Any]) -> None:
    def story(loop: Any) -> Any:
        seen = []
        for batch in BATCHES:
            with HOOKS[hooks]():
                loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    assert_same_story(Net, story, place=place, units=6)


@LATE_TOO
@SCHEDULES
@AROUND
@viewed
def test_hooks_around_one_operation_of_a_forward(hooks: str, update: str, place: dict[str, Any]) -> None:
    """User's hooks may keep the parameter itself, which autograd gets back in backward without Python dispatch."""

    class Inside(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with HOOKS[hooks]():
                out = F.linear(x, self.weight, self.bias)
            return x + 0.3 * torch.tanh(out)

    place = {**place, "update": update}
    assert_same_story(lambda: Net(layer=Inside), training(BATCHES), place=place, units=6)


class Gated(Layer):
    """Multiplies by its bias: the graph saves the parameter itself and no view of it."""

    def __init__(self, apply: Apply | None = None) -> None:
        super().__init__(apply)
        nn.init.ones_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(F.linear(x, self.weight)) * self.bias


@LATE_TOO
@SCHEDULES
@AROUND
@viewed
def test_hooks_that_keep_the_parameter_itself(hooks: str, update: str, place: dict[str, Any]) -> None:
    """Its values are there until backward, and its update waits for that, although its unit was released."""

    class Inside(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with HOOKS[hooks]():
                return super().forward(x)

    place = {**place, "update": update}
    assert_same_story(lambda: Net(layer=Inside), training(BATCHES), place=place, units=6)


def test_hooks_of_a_forward_cost_no_buffer(make_engine: OpenEngine) -> None:
    """Units are updated during backward and leave their buffers, although hooks save their parameters."""
    hooks: Callable[[], Any] = nullcontext

    class Inside(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hooks():
                return super().forward(x)

    engine = make_engine(seeded(lambda: Net(layer=Inside)), **NVME, update="during_backward")
    units = engine.units
    train(engine, BATCHES[:2])
    for each, batch in zip((nullcontext, save_on_cpu, HOOKS["list"]), BATCHES[2:], strict=True):
        hooks = each
        engine.backward(engine(*batch))
        assert all(unit.updated_early for unit in units)
        engine.step()
    engine.settle()
    assert not any(unit.bound for unit in units) and not engine.parts.store.kept._kept


@viewed
def test_a_view_edited_after_a_step_under_hooks(make_engine: OpenEngine) -> None:
    """Autograd places the edited view in its parameter by the layout of both, which the end of the step keeps."""

    class Inside(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                return super().forward(x)

    engine = make_engine(seeded(lambda: Net(layer=Inside)), **NVME, update="next_forward")
    weights = [layer.weight for layer in engine.module.layers]
    views = [weight.t() for weight in weights]
    engine.backward(engine(*BATCHES[0]))
    assert engine.units[5] in engine.parts.store.kept and engine.units[5].residency is Residency.RELEASED
    engine.drop_gradients()
    with torch.no_grad():
        views[5].mul_(2)
    (gradient,) = torch.autograd.grad(views[5][:, 0].sum(), weights[5])
    expected = torch.zeros(32, 32)
    expected[0] = 1
    assert torch.equal(gradient, expected)


@PLACES
@AROUND
@viewed
def test_hooks_around_a_part_of_the_forward(hooks: str, place: dict[str, Any]) -> None:
    class Partly(Net):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                with HOOKS[hooks]() if number % 2 else nullcontext():
                    x = layer(x) + 0.1 * x @ self.layers[0].weight
            return F.mse_loss(x, targets)

    assert_same_story(Partly, training(BATCHES), place=place, units=6)


@PLACES
@AROUND
@viewed
def test_hooks_around_a_loss_outside_of_the_model(hooks: str, place: dict[str, Any]) -> None:
    def story(loop: Any) -> Any:
        seen = []
        for x, targets in BATCHES:
            loss = loop.model(x, targets)
            with HOOKS[hooks]():
                for layer in loop.model.layers:
                    loss = loss + 0.01 * F.linear(x, layer.weight).square().mean() + layer.bias.exp().mean()
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    assert_same_story(Net, story, place=place, units=6)


# -- views -----------------------------------------------------------------------------------------------------------


class Flat(Layer):
    """Reads its weight through a view made in the first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flat is None:
            self.flat = self.weight.data.view(-1)
        return super().forward(x) + 0.1 * self.flat.view(32, 32)[0]


@LATE_TOO
@SCHEDULES
@viewed
def test_a_view_made_in_the_first_forward(update: str, place: dict[str, Any]) -> None:
    """A view made in the first forward shows the present values in later forwards and right after each step."""

    def extra(loop: Any, number: int) -> Any:
        return [layer.flat.sum().item() for layer in loop.model.layers], loop.model.layers[3].flat.clone()

    place = {**place, "update": update}
    assert_same_story(lambda: Net(layer=Flat), training(BATCHES, extra), place=place, units=6, leaks=True)


@LATE_TOO
@SCHEDULES
@pytest.mark.parametrize("accumulation", [1, 2])
@viewed
def test_views_that_the_loop_keeps(accumulation: int, update: str, place: dict[str, Any]) -> None:
    """Views of all units (data, a row, an array, a transposed view) show the present values after every step."""

    def story(loop: Any) -> Any:
        layers = loop.model.layers
        views: list[Any] = [layer.weight.data for layer in layers[:3]]
        views += [layers[3].weight.detach()[2], layers[4].weight.detach().numpy(), layers[5].weight.data.t()]
        return training(BATCHES[:4], lambda loop, number: [float(view.sum()) for view in views])(loop)

    place = {**place, "update": update, "accumulation": accumulation}
    assert_same_story(Net, story, place=place, units=6, leaks=True)


@PLACES
@viewed
def test_a_view_after_loading_and_evaluating(place: dict[str, Any]) -> None:
    def story(loop: Any) -> Any:
        view = loop.model.layers[2].weight.data

        def extra(loop: Any, number: int) -> Any:
            before = view.sum().item()
            with torch.no_grad():
                found = loop.model(*BATCHES[0]).item()
            return before, found, view.sum().item()

        return training(BATCHES, extra)(loop)

    assert_same_story(Net, story, place=place, units=6, leaks=True)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("prefetch", [0, 9000])
def test_one_view_costs_no_buffer(prefetch: int, update: str, make_engine: OpenEngine) -> None:
    """Its unit stays where it is, and others make room: nobody is warned."""
    engine = make_engine(seeded(Net), **{**NVME, "prefetch_bytes": prefetch}, update=update)
    train(engine, BATCHES[:2])
    view = engine.module.layers[2].weight.data
    train(engine, BATCHES[2:])
    with torch.no_grad():
        engine.module(*BATCHES[0])
    assert torch.equal(view, engine.module.layers[2].weight)
    assert not engine.parts.store.kept.warned


@viewed
def test_a_step_fetches_what_is_viewed_and_nothing_else(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Net), **NVME, update="next_forward")
    store = engine.parts.store

    def fetches(batch: tuple[torch.Tensor, ...]) -> int:
        engine.backward(engine(*batch))
        before = store.fetches
        engine.step()
        return store.fetches - before

    fetches(BATCHES[0])
    assert fetches(BATCHES[1]) == 0
    views = [layer.weight.data for layer in engine.module.layers[4:]]
    fetches(BATCHES[2])
    assert fetches(BATCHES[3]) <= len(views)
    views.clear()
    fetches(BATCHES[4])
    assert fetches(BATCHES[0]) == 0


@viewed
def test_closing_releases_the_buffers_of_views(make_engine: OpenEngine) -> None:
    """Whoever keeps the closed engine keeps no memory with it."""
    engine = make_engine(seeded(Net), **NVME)
    views = [layer.weight.data for layer in engine.module.layers]
    with torch.no_grad():
        engine.module(*BATCHES[0])
    buffers = [weakref.ref(kept.buffer) for kept in engine.parts.store.kept._kept.values()]
    assert buffers and views
    engine.close()
    assert all(buffer() is None for buffer in buffers)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@viewed
def test_a_second_backward_through_a_graph_that_saved_a_view(update: str, make_engine: OpenEngine) -> None:
    """A second backward after the update raises PyTorch's error or ours, and never gives a gradient of other values."""
    engine = make_engine(seeded(Net), **NVME, update=update)
    layers = engine.module.layers
    x = BATCHES[0][0].clone().requires_grad_()
    outside = F.linear(x, layers[1].weight.detach()).sum()  # none of our hooks saves it
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    with pytest.raises((InfinityError, RuntimeError), match=r"modified by an inplace|before they were updated"):
        outside.backward()
    engine.backward(engine(*BATCHES[1]))
    engine.step()

"""torch.func over a managed model works on the user's tensors. On managed parameters it is right, or raises one
UsageError by name that leaves the model unharmed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.errors import UsageError
from support.beside import NVME, PLACES, EngineLoop, PlainLoop, assert_like, assert_same_story, training
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import train
from support.models import seeded, vector_batches

BATCHES = vector_batches(5, width=8)
X, Y = BATCHES[0]


class Small(nn.Module):
    """(batch, 8) and targets → mean squared error; a Hessian of it is affordable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        out = self.trunk(x)
        return out if targets is None else F.mse_loss(out, targets)


def own(model: nn.Module, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return copies of these parameters, or of all, as the user's own tensors."""
    wanted = {name: p.shape for name, p in model.named_parameters() if not names or name in names}
    return {name: torch.arange(shape.numel()).mul(len(name)).sin().view(shape) * 0.3 for name, shape in wanted.items()}


def loss_of(model: nn.Module, values: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = functional_call(model, values, (X, Y))
    return loss


OTHER = seeded(Small)
SOME = ("layers.1.weight", "layers.2.bias")
Use = Callable[[Any], Any]


def with_gradients(model: Any, names: tuple[str, ...]) -> Any:
    values = {name: value.requires_grad_() for name, value in own(model, names).items()}
    return torch.autograd.grad(loss_of(model, values), list(values.values()))


def stacked(model: Any) -> dict[str, torch.Tensor]:
    return {name: torch.stack([value, value * 0.5, -value]) for name, value in own(model).items()}


OWN: dict[str, Use] = {
    "all": lambda model: loss_of(model, own(model)),
    "some": lambda model: loss_of(model, own(model, SOME)).detach(),
    "parameters": lambda model: loss_of(model, {n: nn.Parameter(v) for n, v in own(model).items()}).detach(),
    "gradients of all": lambda model: with_gradients(model, ()),
    "grad": lambda model: grad(lambda v: loss_of(model, v))(own(model)),
    "vjp": lambda model: vjp(lambda v: loss_of(model, v), own(model))[1](torch.tensor(2.0)),
    "jvp": lambda model: jvp(lambda v: loss_of(model, v), (own(model),), (own(model),)),
    "hessian": lambda model: hessian(lambda w: loss_of(model, {**own(model), "layers.1.bias": w}))(torch.zeros(8)),
    "jacrev": lambda model: jacrev(lambda w: functional_call(model, {**own(model), "layers.0.bias": w}, (X,)))(
        torch.zeros(8)
    ),
    "ensemble": lambda model: vmap(lambda v: functional_call(model, v, (X, Y)))(stacked(model)),
    "ensemble over data": lambda model: vmap(lambda v, x: functional_call(model, v, (x,)), in_dims=(0, None))(
        stacked(model), X
    ),
    "gradients of an ensemble": lambda model: vmap(grad(lambda v: functional_call(model, v, (X, Y))))(stacked(model)),
    "gradients of samples": lambda model: vmap(
        grad(lambda v, x, y: functional_call(model, v, (x[None], y[None]))), in_dims=(None, 0, 0)
    )(own(model), X, Y),
    "stacked modules": lambda model: vmap(lambda p, b: functional_call(OTHER, (p, b), (X, Y)))(
        *stack_module_state([seeded(Small, 1), seeded(Small, 2)])
    ).detach(),
    "without gradients": lambda model: torch.no_grad()(lambda: loss_of(model, own(model)))(),
}


@PLACES
@pytest.mark.parametrize("use", list(OWN))
def test_tensors_of_the_users_stand_for_parameters(use: str, place: dict[str, Any]) -> None:
    """The user's tensors replace parameters between steps, and training goes on as in the plain loop."""
    place = {**place, **({"unit_size": 256} if "unit_size" in place else {})}
    assert_same_story(Small, training(BATCHES, lambda loop, number: OWN[use](loop.model)), place=place, units=4)


MANAGED: dict[str, Use] = {
    "vmap over samples": lambda model: vmap(lambda x: model(x))(X).detach(),
    "vmap over a part": lambda model: vmap(model.layers[1])(X).detach(),
    "vmap over losses": lambda model: vmap(lambda x, y: model(x, y))(X, Y).detach(),
    "vmap, some of the user's": lambda model: vmap(lambda x: functional_call(model, own(model, SOME), (x,)))(
        X
    ).detach(),
    "stacks of some": lambda model: vmap(lambda w: functional_call(model, {"layers.1.weight": w}, (X, Y)))(
        torch.stack([own(model)["layers.1.weight"]] * 2)
    ).detach(),
    "grad of the input": lambda model: grad(lambda x: model(x, Y))(X).detach(),
    "vjp of the input": lambda model: vjp(lambda x: model(x), X)[1](torch.ones_like(X))[0].detach(),
    "jvp of the input": lambda model: jvp(lambda x: model(x), (X,), (torch.ones_like(X),))[1].detach(),
    "hessian of the input": lambda model: hessian(lambda x: model(x[None], Y[:1]))(X[0]).detach(),
    "jacrev of the input": lambda model: jacrev(lambda x: model(x[None])[0])(X[0]).detach(),
    "grad of parameters": lambda model: grad(lambda v: loss_of(model, v))(dict(model.named_parameters())),
    "grad of detached": lambda model: grad(lambda v: loss_of(model, v))(
        {name: p.detach() for name, p in model.named_parameters()}
    ),
    "grad of clones": lambda model: grad(lambda v: loss_of(model, v))(
        {name: p.detach().clone() for name, p in model.named_parameters()}
    ),
    "hessian of one": lambda model: hessian(lambda w: loss_of(model, {"layers.2.bias": w}))(
        model.layers[2].bias.detach()
    ).detach(),
    "jvp of parameters": lambda model: [
        v.detach()
        for v in jvp(
            lambda v: loss_of(model, v),
            (dict(model.named_parameters()),),
            ({name: torch.ones_like(p) for name, p in model.named_parameters()},),
        )
    ],
    "gradients of samples": lambda model: vmap(
        grad(lambda v, x, y: functional_call(model, v, (x[None], y[None]))), in_dims=(None, 0, 0)
    )({name: p.detach() for name, p in model.named_parameters()}, X, Y),
    "kept parameter": lambda model: vmap(lambda x: x @ model.layers[1].weight)(X).detach(),
    "linearize": lambda model: torch.func.linearize(lambda x: model(x), X)[0].detach(),
}


@PLACES
@pytest.mark.parametrize("use", list(MANAGED))
@pytest.mark.filterwarnings("ignore:something still refers")
def test_transforms_of_the_managed_model(use: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Transforms of the model are right or refused by name, three times; then training equals the plain loop."""
    place = {**place, **({"unit_size": 256} if "unit_size" in place else {})}
    config = engine_config(**place)
    reference = PlainLoop(seeded(Small), config)
    expected = training(BATCHES[:2])(reference)
    wanted = MANAGED[use](reference.model)
    expected += training(BATCHES[2:])(reference)
    engine = make_engine(seeded(Small), config)
    loop = EngineLoop(engine)
    seen = training(BATCHES[:2])(loop)
    for _ in range(3):
        try:
            found = MANAGED[use](engine.module)
        except UsageError as error:
            assert "torch.func" in str(error)
        else:
            assert_like(found, wanted)
        found = None
    seen += training(BATCHES[2:])(loop)
    assert_like(seen, expected)
    assert engine.parts.runner.scope.depth == 0


def test_a_transform_inside_of_the_models_forward() -> None:
    """A model may call torch.func on a network of its own, with tensors or with its parameters."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.start = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = vmap(lambda row: torch.tanh(row) * 2)(x)
            return x + torch.tanh(self.up(slope)) + self.start

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner() for _ in range(4))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.mse_loss(x, targets)

    assert_same_story(Outer, training(BATCHES), place={**NVME, "unit_size": 256}, units=4)


class Sloped(nn.Module):
    """(batch, 8) → the same: adds a derivative of its network by `slope`, unless that is None."""

    slope: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)).square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x) if self.slope is None else self.slope(x))


class Slopes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sloped() for _ in range(4))


@pytest.mark.parametrize(
    "slope",
    [
        lambda part, x: grad(part.energy)(x),
        lambda part, x: vjp(part.up, x)[1](x)[0],
        lambda part, x: vmap(grad(part.energy))(x),
        lambda part, x: vmap(jacrev(part.up))(x).sum(2),
        lambda part, x: vmap(hessian(part.energy))(x).sum(2),
        lambda part, x: grad(lambda y: (y * y).sum())(x),
    ],
    ids=["grad", "vjp", "gradients of samples", "jacrev", "hessian", "grad without parameters"],
)
@PLACES
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_derivative_in_a_forward_is_refused_by_name(
    slope: Callable[[Any, torch.Tensor], torch.Tensor],
    place: dict[str, Any],
    checkpointed: bool,
    make_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the alternative, and the engine continues."""
    engine = make_engine(seeded(Slopes), **place)
    before = training(BATCHES[:2])(EngineLoop(engine))
    with monkeypatch.context() as patched:
        patched.setattr(Sloped, "slope", slope)
        with pytest.raises(UsageError, match=r"torch\.func \(grad.*torch\.autograd\.grad") as refused:
            checkpoint(engine, X, Y, use_reentrant=False) if checkpointed else engine(X, Y)
        assert isinstance(refused.value.__cause__, RuntimeError)
    del refused  # with torch 2.11, hooks of a checkpoint stay until its traceback is released
    seen = before + training(BATCHES[2:])(EngineLoop(engine))
    assert_like(seen, training(BATCHES)(PlainLoop(seeded(Slopes), engine_config(**place))))


def test_an_error_is_freed_with_its_last_reference(make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of the error and a frame would keep the forward's tensors, and hooks of a checkpoint, for longer."""
    engine = make_engine(seeded(Slopes))
    monkeypatch.setattr(Sloped, "slope", lambda part, x: grad(part.energy)(x))
    with pytest.raises(UsageError) as refused:
        engine(X, Y)
    error = weakref.ref(refused.value)
    del refused
    assert error() is None


def test_nothing_is_left_behind(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Small), **{**NVME, "unit_size": 256})
    for use in OWN.values():
        use(engine.module)
    assert_nothing_leaked(engine)


class Twice(Small):
    """A model with one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Sequential(self.layers[0])


def test_a_call_that_leaves_its_tensors_behind(make_engine: OpenEngine) -> None:
    """PyTorch restores a module that has two names wrongly: states are not read or written, and no step is made."""
    engine = make_engine(seeded(Twice), **NVME)
    model: Any = engine.module
    train(engine, BATCHES[:2])
    kept = dict(model.layers[0]._parameters.items())
    values = own(model)
    functional_call(model, values, BATCHES[0], tie_weights=False)
    train(engine, BATCHES[2:3])
    functional_call(model, values, BATCHES[0])
    assert model.layers[0].weight is values["layers.0.weight"], "torch restores it now: remove the check"
    engine.backward(engine(*BATCHES[3]))
    for use in (engine.step, engine.state_dict):
        with pytest.raises(UsageError, match=r"(weight|bias) of a Linear is another tensor.*tie_weights=False"):
            use()
    for name, parameter in kept.items():
        model.layers[0]._parameters[name] = parameter
    engine.step()
    assert {"layers.0.weight", "box.0.weight"} <= engine.state_dict().keys()

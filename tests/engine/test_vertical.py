"""`engine.train_batch`: the same bits as a loop over micro-batches, in vertical order where the model allows."""

from __future__ import annotations

import contextlib
import contextvars
import io
import itertools
import logging
import os
import queue
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import ModelError, NonFiniteError, UsageError
from infinity.nn.replace import tile
from infinity.sim.gpt2 import GPT2, GPT2Config
from support import counter
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import VOCABULARY, Block, Linears, Stack, seeded, token_batches, vector_batches
from support.states import states_of

STEPS = 3
ORDINARY = "micro-batches run one after the other, since "


def config_of(accumulation: int = 3, **options: Any) -> Config:
    return engine_config(**{"accumulation": accumulation, "unit_size": 20_000, **options})


def outcome(engine: TrainingEngine, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return everything that training has changed."""
    values = {**states_of(engine), **parameters_of(engine)}
    values["losses"] = torch.stack([loss.detach() for loss in losses])
    values["steps"] = torch.tensor([engine.global_steps, engine.skipped_steps, engine.loss_scale.value])
    return values


def loop(make: Callable[[], nn.Module], config: Config, batches: Sequence[Any], loss_of: Any) -> dict[str, Any]:
    """Train with `backward` and `step` for each micro-batch."""
    with open_engine(seeded(make), config) as engine:
        losses: list[torch.Tensor] = []
        norms = []
        for start in range(0, len(batches), engine.batch.accumulation):
            total: Any = None
            for batch in batches[start : start + engine.batch.accumulation]:
                loss = loss_of(engine, batch)
                engine.backward(loss)
                engine.step()
                total = loss.detach() if total is None else total + loss.detach()
            losses.append(total / engine.batch.accumulation)
            norms.append(engine.grad_norm)
        return {**outcome(engine, losses), "norms": norms}


def by_batches(
    make: Callable[[], nn.Module], config: Config, batches: Sequence[Any], loss_fn: Any = None
) -> tuple[dict[str, Any], bool]:
    """Train with `train_batch`. Returns the outcome, and whether steps ran vertically."""
    with open_engine(seeded(make), config) as engine:
        losses, norms = [], []
        iterator = iter(batches)
        for _ in range(len(batches) // engine.batch.accumulation):
            losses.append(engine.train_batch(iterator, loss_fn))
            norms.append(engine.grad_norm)
        return {**outcome(engine, losses), "norms": norms}, is_vertical(engine)


def is_vertical(engine: TrainingEngine) -> bool:
    trainer = engine._batches
    return trainer._order is not None and trainer._order._has_run and not trainer.reason


def plainly(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert found.pop("norms") == expected.pop("norms")
    for name, value in expected.items():
        assert value.dtype == found[name].dtype and value.numel() == found[name].numel(), name
        one, other = (v.detach().contiguous().reshape(-1).view(torch.uint8) for v in (value, found[name]))
        assert torch.equal(one, other), name


def check(
    make: Callable[[], nn.Module],
    config: Config,
    *,
    vertical: bool = True,
    batches: Sequence[Any] | None = None,
    loss_of: Any = plainly,
    loss_fn: Any = None,
) -> None:
    """Assert that both ways of training have the same bits."""
    count = STEPS * config.resolve_batch(1).accumulation
    batches = batches or token_batches(count)
    expected = loop(make, config, batches, loss_of)
    found, was_vertical = by_batches(make, config, batches, loss_fn)
    assert was_vertical == vertical
    assert_equal(found, expected)


def gpt2(*, tied: bool = True, checkpointed: bool = False) -> nn.Module:
    return GPT2(GPT2Config(VOCABULARY, 8, 4, 32, 2, tie_word_embeddings=tied, checkpoint_activations=checkpointed))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tied=False),
    "gpt2 checkpointed": lambda: gpt2(checkpointed=True),
    "stack": Stack,
    "stack tied": lambda: Stack(tied=True),
}


@pytest.mark.every_case
@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_ordinary_order(name: str, update: str) -> None:
    check(MODELS[name], config_of(update=update))


@pytest.mark.parametrize(
    "options",
    [
        {"param": "cpu", "optim": "cpu"},
        {"param": "none", "optim": "none"},
        {"param": "nvme", "optim": "cpu"},
        {"bf16": True},
        {"bf16": True, "accumulated_in": "bf16"},
        {"clip": 0.1},
        {"clip": 0.1, "bf16": True, "accumulation": 5},
        {"fp16": {"initial_scale_power": 24, "hysteresis": 1}},
        {"fp16": {"initial_scale_power": 24, "hysteresis": 1}, "clip": 0.1},
        {"unit_size": 4000},
        {"moments": "8bit", "bf16": True},
        {"activations": {"device": "cpu", "min_bytes": 1}},
        {"activations": {"device": "nvme", "min_bytes": 1}, "accumulation": 2},
        {"optimizer": "Adam", "weight_decay": 0.1},
        {"accumulation_buffers": True},
        {"check_nan": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "stack"])
def test_the_bits_in_every_configuration(name: str, options: dict[str, Any]) -> None:
    check(MODELS[name], config_of(**options))


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"initial_scale_power": 8, "hysteresis": 1}},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("optim", ["cpu", "nvme"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "stack"])
@pytest.mark.parametrize(
    "model, accumulated_in",
    [(model, dtype) for model in FORMATS for dtype in FORMATS if dtype != "fp16" or model == "fp16"],
)
def test_the_bits_in_every_dtype_of_gradients(
    model: str, accumulated_in: str, name: str, accumulation: int, clip: float, optim: str
) -> None:
    """Gradients are rounded as often as in the ordinary order, where their sum has fewer bits than they have, too."""
    config = config_of(accumulation, accumulated_in=accumulated_in, clip=clip, optim=optim, **FORMATS[model])
    check(MODELS[name], config, vertical=accumulation > 1)


def test_steps_that_overflow_are_skipped_alike() -> None:
    config = config_of(fp16={"initial_scale_power": 24, "hysteresis": 1})
    with open_engine(seeded(gpt2), config) as engine:
        batches = iter(token_batches(STEPS * 3))
        for _ in range(STEPS):
            engine.train_batch(batches)
        assert is_vertical(engine)
        assert engine.skipped_steps


class Scaled(nn.Module):
    """A block, and the token mixing of a linear layer between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.between = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block, between in zip(self.blocks, self.between, strict=True):
            x = torch.tanh(between(block(x)))
        return F.mse_loss(x, y)


class TwoStreams(nn.Module):
    """Blocks take two tensors, and one of them twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, *, again: torch.Tensor, other: torch.Tensor) -> Any:
            y = torch.tanh(self.linear(x) + other * again)
            return y, other + y * x

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        other = x * 2
        for block in self.blocks:
            x, other = block(x, again=x, other=other)
        return F.mse_loss(x + other, y)


@pytest.mark.parametrize("make", [Scaled, TwoStreams, Linears], ids=lambda make: make.__name__)
def test_models_with_code_between_their_blocks(make: Callable[[], nn.Module]) -> None:
    check(make, config_of(unit_size=4000), batches=vector_batches(STEPS * 3))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 8))


def test_a_sequential_with_a_loss_function() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 32, generator=generator) for _ in range(12)]

    def loss_fn(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (output - batch[:, :8]).square().mean()

    check(
        sequential,
        config_of(unit_size=4000),
        batches=batches,
        loss_of=lambda model, batch: loss_fn(model(batch), batch),
        loss_fn=loss_fn,
    )


@pytest.mark.parametrize("form", ["mapping", "attribute", "tuple", "list"])
def test_forms_of_batches_and_outputs(form: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            loss = self.stack(tokens, targets)
            if form == "mapping":
                return {"loss": loss}
            return (loss, tokens) if form == "tuple" else type("Output", (), {"loss": loss})

    batches: list[Any] = token_batches(12)
    loss_of = {
        "mapping": lambda model, batch: model(**batch)["loss"],
        "attribute": lambda model, batch: model(*batch).loss,
        "tuple": lambda model, batch: model(*batch)[0],
        "list": lambda model, batch: model(*batch).loss,
    }[form]
    if form == "mapping":
        batches = [{"tokens": tokens, "targets": targets} for tokens, targets in batches]
    if form == "list":
        batches = [list(batch) for batch in batches]
    check(Outer, config_of(), batches=batches, loss_of=loss_of)


def test_frozen_blocks_below_trained_ones() -> None:
    def make() -> nn.Module:
        model = Stack()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    check(make, config_of(), vertical=False)

    def adapted() -> nn.Module:
        model = Stack()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "up.bias" in name)
        return model

    check(adapted, config_of())


class NoGradient(torch.autograd.Function):
    """The identity, whose backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


STOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": torch.Tensor.detach,
    "none": NoGradient.apply,  # type: ignore[dict-item]
    "sometimes": lambda x: NoGradient.apply(x) if x.sum() > 0 else x,  # type: ignore[no-any-return, no-untyped-call]
}


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", STOPS)
def test_gradients_that_end_in_a_block(way: str, tied: bool, update: str) -> None:
    """A tied head keeps its gradients, and the parts below get none, not zeros."""

    class Stops(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(STOPS[way](x))

    def make() -> nn.Module:
        model = Stack(tied=tied)
        model.blocks[3] = Stops(32)
        return model

    check(make, config_of(update=update))


def test_blocks_of_complex_tensors() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.complex(torch.tanh(self.linear(z.real)), z.imag)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Complex() for _ in range(6))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            z = torch.complex(x, 2 * x)
            for block in self.blocks:
                z = block(z)
            return F.cross_entropy(self.head(z.real + z.imag).flatten(0, 1), targets.flatten())

    check(Model, config_of(unit_size=4000))


def test_micro_batches_of_different_shapes() -> None:
    batches = [tuple(part[: 1 + n % 4, : 8 - n % 3] for part in batch) for n, batch in enumerate(token_batches(12))]
    check(Stack, config_of(), batches=batches)


# -- models and steps in the ordinary order ------------------------------------------------------------------------


class Skips(Stack):
    """The output of the first block is added to that of the last one."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](self.embedding(tokens))
        for block in self.blocks[1:]:
            x = block(x)
        return F.cross_entropy(self.head(x + first).flatten(0, 1), targets.flatten())


class Repeats(Stack):
    """Each block runs twice."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Drops(Stack):
    """Dropout in front of the blocks."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Remembers(Stack):
    """Blocks use a tensor that the model keeps for the duration of a forward."""

    mask: Any = None

    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.owner[0].mask  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scaling(32) for _ in range(6))
        for block in self.blocks:
            block.owner = [self]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.mask = (tokens % 5 / 5).unsqueeze(-1)
        try:
            return super().forward(tokens, targets)
        finally:
            self.mask = None


class Counts(Stack):
    """The model counts its forwards in a buffer, and scales by the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += 1  # type: ignore[operator]
        return super().forward(tokens, targets) * self.count


class Hands(Stack):
    """A block leaves a tensor for the next one."""

    class Giving(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = self.shared.pop("left", 1.0)  # type: ignore[attr-defined]
            self.shared["left"] = x.detach().mean()  # type: ignore[attr-defined]
            return super().forward(x) * left

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Giving(32) for _ in range(6))
        shared: dict[str, Any] = {}
        for block in self.blocks:
            block.shared = shared

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        self.blocks[0].shared.clear()  # type: ignore[operator, union-attr]
        return loss


def reentrant() -> nn.Module:
    return Stack(run=lambda block, x: checkpoint(block, x, use_reentrant=True))  # type: ignore[arg-type, return-value]


class Biased(Stack):
    """All blocks use a bias that the model computes from a parameter."""

    class Adding(Block):
        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            assert bias is not None
            return super().forward(x) + bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Adding(32) for _ in range(6))
        self.bias = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        bias = self.bias(x)
        for block in self.blocks:
            x = block(x, bias=bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class TiedTwice(Stack):
    """The embedding is used twice before the blocks, and is the head."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.embedding(targets)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def hooked() -> nn.Module:
    model = Stack()
    model.blocks[2].register_forward_hook(lambda *_: None)
    return model


class Masked(Stack):
    """Keeps a mask for its blocks; the last micro-batch of a step has none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers.Scaling(32) for _ in range(6))
        self.mask: Any = 1.0
        for block in self.blocks:
            block.owner = [self]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.mask = (tokens % 5 / 5).unsqueeze(-1) if tokens[0, 0] else 1.0
        try:
            return super().forward(tokens, targets)
        finally:
            self.mask = 1.0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


STATE = [0]
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
LOCAL = threading.local()
LOCAL.factor = 3


def of_global(model: Any) -> Any:
    STATE[0] += 1
    return STATE[0]


def of_class(model: Any) -> Any:
    type(model).shared["count"] += 1
    return type(model).shared["count"]


def of_slots(model: Any) -> Any:
    model.state.count += 1
    return model.state.count


def of_array(model: Any) -> Any:
    model.state[0] += 1
    return float(model.state[0])


def of_data(model: Any) -> Any:
    model.state.data.add_(1)
    return model.state.clone()


def of_context(model: Any) -> Any:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def of_thread(model: Any) -> Any:
    return getattr(LOCAL, "factor", 1)


def of_generator(model: Any) -> Any:
    return float(model.state.random())


def of_iterator(model: Any) -> Any:
    return next(model.state)


def of_depth(model: Any) -> Any:
    model.state["a"]["b"]["c"]["d"]["e"][0] += 1
    return model.state["a"]["b"]["c"]["d"]["e"][0]


COUNTER = counter.Counter()


def of_module(model: Any) -> Any:
    counter.count += 1
    return counter.count


def of_function_of_module(model: Any) -> Any:
    return counter.increase()


def of_attribute_of_class(model: Any) -> Any:
    counter.Counter.total += 1
    return counter.Counter.total


def of_class_method(model: Any) -> Any:
    return counter.Counter.increase_total()


def of_object(model: Any) -> Any:
    return COUNTER.increase()


def of_environment(model: Any) -> Any:
    os.environ["COUNT"] = str(int(os.environ.get("COUNT", "0")) + 1)
    return int(os.environ["COUNT"])


def of_callable(model: Any) -> Any:
    return model.state()


def counting(numbers: list[int]) -> int:
    numbers[0] += 1
    return numbers[0]


def of_queue(model: Any) -> Any:
    number = model.state.get() + 1
    model.state.put(number)
    return number


def filled_queue() -> Any:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    made.put(0)
    return made


def of_reference(model: Any) -> Any:
    return model.state().increase()


def of_view(model: Any) -> Any:
    return counting(model.state["numbers"])


class Hidden(Stack):
    """The loss is multiplied by numbers which each forward changes."""

    shared: dict[str, int] = {}  # noqa: RUF012 - state of the class

    def __init__(self, number: Callable[[Any], Any], state: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        STATE[0] = Hidden.shared["count"] = counter.count = counter.Counter.total = 0
        os.environ.pop("COUNT", None)
        VARIABLE.set(0)
        self.number = number
        self.state = state()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = self.number(self)
        return super().forward(tokens, targets) * (first + self.number(self))


HIDDEN: list[Callable[[], nn.Module]] = [
    partial(Hidden, of_global),
    partial(Hidden, of_class),
    partial(Hidden, of_module),
    partial(Hidden, of_function_of_module),
    partial(Hidden, of_attribute_of_class),
    partial(Hidden, of_class_method),
    partial(Hidden, of_object),
    partial(Hidden, of_environment),
    partial(Hidden, of_thread),
    partial(Hidden, of_slots, Slotted),
    partial(Hidden, of_array, lambda: numpy.zeros(1)),
    partial(Hidden, of_data, lambda: torch.zeros(())),
    partial(Hidden, of_generator, lambda: numpy.random.default_rng(0)),
    partial(Hidden, of_generator, lambda: random.Random(0)),
    partial(Hidden, of_iterator, itertools.count),
    partial(Hidden, of_iterator, lambda: (number for number in range(100))),
    partial(Hidden, of_callable, lambda: partial(counting, [0])),
    partial(Hidden, of_queue, filled_queue),
    partial(Hidden, of_reference, lambda: weakref.ref(COUNTER)),
    partial(Hidden, of_view, lambda: MappingProxyType({"numbers": [0]})),
    partial(Hidden, of_depth, lambda: {"a": {"b": {"c": {"d": {"e": [0]}}}}}),
]


class Differentiates(Stack):
    """The loss contains a gradient through the blocks."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        (gradient,) = torch.autograd.grad(loss, [first], retain_graph=True, allow_unused=True)
        return loss if gradient is None else loss * (1 + gradient.norm().item())


def with_gradient_hooks() -> nn.Module:
    """The hooks of all parameters share a number."""
    model, factor = Stack(), [1.0]

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        factor[0] *= 0.99
        return gradient * factor[0]

    for parameter in model.parameters():
        parameter.register_hook(scale)
    return model


class Tags(Stack):
    """A block multiplies its input by an attribute of it."""

    class Tagging(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x) * getattr(x, "factor", 1.0)
            x.factor = 1.5  # type: ignore[attr-defined]
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Tagging(32) for _ in range(6))


class Subclassed(torch.Tensor):
    """A class of tensors."""


class OfClass(Stack):
    """Blocks depend on the class of their input."""

    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 0.5 if isinstance(x, Subclassed) else 1.0
            return (super().forward(x) * factor).as_subclass(Subclassed)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Asking(32) for _ in range(6))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.as_subclass(torch.Tensor)).flatten(0, 1), targets.flatten())


class CountsInParameter(Stack):
    """A frozen parameter counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
        return super().forward(tokens, targets) * self.count


class Decays(Stack):
    """Each forward shrinks a trained weight."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        return super().forward(tokens, targets)


class InContext(Stack):
    """The blocks run in a context, and what follows does not."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.context = context

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with self.context():
            for block in self.blocks:
                x = block(x)
        third = torch.full((), 1 / 3, dtype=torch.get_default_dtype())
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) * third


@contextlib.contextmanager
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Locks(Stack):
    """Forwards exclude each other."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return super().forward(tokens, targets)


class FastWeights(Stack):
    """Weights of the blocks depend on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        factor = 1 + tokens.float().mean() / VOCABULARY
        weights = {name: value * factor for name, value in self.blocks.named_parameters()}
        x = torch.func.functional_call(self.blocks, weights, (self.embedding(tokens),))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


CONTEXTS = (
    double,
    partial(sdpa_kernel, SDPBackend.MATH),
    partial(contextlib.redirect_stdout, io.StringIO()),
    torch.nn.utils.parametrize.cached,
)


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (Skips, "a gradient reaches a block by another way"),
    (Biased, "a gradient reaches a block by another way"),
    (Repeats, "does not call the blocks of one list"),
    (Drops, "random numbers"),
    (Remembers, "changes attributes"),
    (Counts, "changes attributes"),
    (Hands, "changes attributes"),
    (reentrant, "no tensor that requires a gradient"),
    (TiedTwice, "used more than once"),
    (hooked, "blocks.2 has hooks"),
    *((make, "changes attributes") for make in HIDDEN),
    (partial(Hidden, of_context), "sets context variables"),
    (Differentiates, "differentiates through its blocks"),
    (with_gradient_hooks, "embedding.weight has hooks"),
    (Tags, "of a subclass or with attributes"),
    (OfClass, "of a subclass or with attributes"),
    (CountsInParameter, "changes attributes"),
    (Decays, "changes attributes"),
    (Locks, "changes attributes"),
    (FastWeights, "changes attributes"),
    *((partial(InContext, context), "the blocks run in a context") for context in CONTEXTS),
]


@pytest.mark.parametrize(("make", "reason"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_other_models_run_in_the_ordinary_order(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bits, and one line that says why."""
    with caplog.at_level(logging.INFO, "infinity"):
        torch.manual_seed(3)
        expected = loop(make, config_of(), token_batches(12), plainly)
        found, vertical = by_batches(make, config_of(), token_batches(12))
    assert not vertical
    lines = [record.message for record in caplog.records if ORDINARY in record.message]
    assert len(lines) == 1 and reason in lines[0]
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "options", [{"stage": 0, "param": "none"}, {"stage": 2, "param": "none"}, {"cache_bytes": "1GiB"}]
)
def test_parameters_that_stay_need_no_other_order(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        check(Stack, config_of(**options), vertical=False)
    assert any("all parameters fit" in record.message for record in caplog.records)


def test_one_micro_batch_a_step_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        check(Stack, config_of(1), vertical=False)
    assert not any("train_batch" in record.message for record in caplog.records)


class Doubles(Block):
    """Edits its input in place where `is_odd`."""

    is_odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2) if self.is_odd else x)  # type: ignore[no-any-return]


class Sometimes(Stack):
    """From some step on, the model does something else."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.last: Any = None
        if way == "edit":
            self.blocks[1] = Doubles(32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        blocks = list(self.blocks)
        odd = bool(tokens[0, 0] >= VOCABULARY // 2)
        first = x
        if odd and self.way == "order":
            blocks.reverse()
        if odd and self.way == "fewer":
            blocks.pop()
        if odd and self.way == "state":
            self.last = x.detach()
        if odd and self.way == "random":
            x = x * torch.rand(())
        if self.way == "edit":
            blocks[1].is_odd = odd
        with double() if odd and self.way == "context" else contextlib.nullcontext():
            for number, block in enumerate(blocks):
                if number == 2 and self.way == "mask":  # set between two blocks, and as before after the last forward
                    self.last = x.detach().mean() if odd and tokens[0, 0] != VOCABULARY - 2 else None
                x = block(x) if self.last is None or number < 4 else block(x) + self.last
        if odd and self.way == "skip":
            x = x + first
        if odd and self.way.startswith("penalty"):
            unused = self.way.endswith("unused")
            (gradient,) = torch.autograd.grad(x.square().sum(), first, create_graph=True, allow_unused=unused)
            if gradient is not None:
                x = x + gradient
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "way", ["order", "fewer", "state", "random", "skip", "edit", "penalty", "penalty, unused", "context", "mask"]
)
def test_a_step_that_does_not_fit_is_run_again(way: str) -> None:
    """Two steps fit, and the next ones do not: they leave the bits of the ordinary order."""
    batches = []
    for number, (tokens, targets) in enumerate(token_batches(12)):
        tokens[0, 0] = (VOCABULARY - 2 if number % 3 == 2 else VOCABULARY - 1) if number >= 6 else 0
        batches.append((tokens, targets))

    outcomes = []
    for run in (
        lambda: loop(lambda: Sometimes(way), config_of(), batches, plainly),
        lambda: by_batches(lambda: Sometimes(way), config_of(), batches),
    ):
        outcomes.append(run())
    (found, vertical) = outcomes[1]  # type: ignore[misc]
    assert not vertical
    assert_equal(found, outcomes[0])  # type: ignore[arg-type]


def test_contexts_that_forwards_leave_in_another_order_are_restored() -> None:
    """All forwards have entered one when it is found."""
    batches = [(tokens.clamp(max=2), targets) for tokens, targets in token_batches(9)]
    for tokens, _ in batches[6:]:
        tokens[0, 0] = VOCABULARY - 1
    with open_engine(seeded(lambda: Sometimes("context")), config_of()) as engine:
        for start in (0, 3, 6):
            engine.train_batch(iter(batches[start : start + 3]))
            assert torch.get_default_dtype() == torch.float32


class ChangesInBackward(torch.autograd.Function):
    """The gradient is multiplied by a number that each backward changes, if it is asked to."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, changes: bool) -> torch.Tensor:
        ctx.changes = changes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.changes:
            ChangesInBackward.factor *= 0.8
        return gradient * ChangesInBackward.factor, None


def test_a_backward_that_changes_a_state_once_is_an_error() -> None:
    class Changing(Block):
        def forward(self, x: torch.Tensor, changes: bool = False) -> torch.Tensor:
            made: torch.Tensor = ChangesInBackward.apply(super().forward(x), changes)  # type: ignore[no-untyped-call]
            return made

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Changing(32) for _ in range(6))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, bool(tokens[0, 0] == VOCABULARY - 1))
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    ChangesInBackward.factor = 1.0
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(9)]
    with open_engine(seeded(Model), config_of(update="next_forward")) as engine:
        engine.train_batch(iter(batches[:3]))
        engine.train_batch(iter(batches[3:6]))
        assert is_vertical(engine)
        batches[7][0][0, 0] = VOCABULARY - 1
        with pytest.raises(ModelError, match="the backward changed a ChangesInBackward for the first time"):
            engine.train_batch(iter(batches[6:]))
        assert engine.global_steps == 2 and engine.micro_steps == 0


def test_a_kept_tensor_that_was_edited_once_is_an_error() -> None:
    class Edits(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if tokens[0, 0] == VOCABULARY - 1:
                self.seen += 1  # type: ignore[operator]
            return super().forward(tokens, targets)

    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(9)]
    with open_engine(seeded(Edits), config_of()) as engine:
        engine.train_batch(iter(batches[:3]))
        engine.train_batch(iter(batches[3:6]))
        before = parameters_of(engine)
        batches[7][0][0, 0] = VOCABULARY - 1
        with pytest.raises(Exception, match="the forward changed a Tensor that all micro-batches share"):
            engine.train_batch(iter(batches[6:]))
        assert engine.global_steps == 2 and engine.micro_steps == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


def test_state_that_a_forward_only_reads() -> None:
    """A state that none of its forwards changes does not keep a model from the vertical order."""
    check(partial(Hidden, lambda model: float(model.state[0]), lambda: numpy.ones(1)), config_of())


class Asserts(Stack):
    """Its code has an assertion, which pytest rewrites to calls of its own functions, and logs."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert tokens.dim() == 2
        logging.getLogger("model").warning("a forward")
        return super().forward(tokens, targets)


def test_a_model_that_asserts_under_pytest() -> None:
    """A snapshot does not follow pytest, whose log and threads change at any time."""
    check(Asserts, config_of())


def test_a_mask_that_the_last_micro_batch_lacks() -> None:
    batches = [(tokens.clamp(min=1), targets) for tokens, targets in token_batches(12)]
    for tokens, _ in batches[2::3]:
        tokens[0, 0] = 0
    check(Masked, config_of(), vertical=False, batches=batches)


class Twice(Stack):
    """Returns logits. A batch that begins with the last token adds the embedding to them, and may be edited first."""

    edits = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        odd = bool(tokens[0, 0] == VOCABULARY - 1)
        if odd and self.edits:
            targets += 1
            targets %= VOCABULARY
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first if odd else x)  # type: ignore[no-any-return]


def odd_batches() -> list[Any]:
    """Batches of which number 7 is one that `Twice` takes in the ordinary order only."""
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets.clone()) for tokens, targets in token_batches(12)]
    batches[7][0][0, 0] = VOCABULARY - 1
    return batches


def test_a_loss_function_with_a_state_runs_once_for_each_micro_batch() -> None:
    class Loss:
        factor = 1.0

        def __call__(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
            self.factor *= 0.5
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) * self.factor

    plain_loss = Loss()
    check(
        Twice,
        config_of(),
        vertical=False,
        batches=odd_batches(),
        loss_of=lambda model, batch: plain_loss(model(*batch), batch),
        loss_fn=Loss(),
    )


def test_a_batch_that_was_edited_is_not_run_again() -> None:
    def loss_fn(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    with open_engine(seeded(Twice), config_of()) as engine:
        engine.module.edits = True
        batches = iter(odd_batches())
        for _ in range(2):
            engine.train_batch(batches, loss_fn)
        assert is_vertical(engine)
        with pytest.raises(ModelError, match="the forward changed a Tensor"):
            engine.train_batch(batches, loss_fn)
        assert engine.global_steps == 2


@pytest.mark.parametrize("way", ["tensor", "numpy", "list", "data", "storage", "shared"])
def test_an_iterator_that_overwrites_its_batch_is_refused(way: str) -> None:
    def overwriting() -> Iterator[Any]:
        memory = [numpy.zeros((4, 8), dtype=numpy.int64) for _ in range(2)]
        buffers: list[Any] = [torch.zeros(4, 8, dtype=torch.int64) for _ in range(2)]
        if way == "shared":
            for buffer in buffers:
                buffer.share_memory_()
        for batch in token_batches(6):
            if way == "list":
                buffers[:] = batch
                yield buffers
                continue
            for place, buffer, part in zip(memory, buffers, batch, strict=True):
                if way == "numpy":
                    place[:] = part.numpy()
                elif way == "storage":
                    buffer.untyped_storage().copy_(part.contiguous().untyped_storage())
                elif way in ("data", "shared"):
                    buffer.data.copy_(part)
                else:
                    buffer.copy_(part)
            yield tuple(map(torch.from_numpy, memory)) if way == "numpy" else tuple(buffers)

    with open_engine(seeded(Stack), config_of()) as engine:
        with pytest.raises(UsageError, match="over an earlier one"):
            engine.train_batch(overwriting())
        engine.train_batch(itertools.repeat(token_batches(1)[0]))
        assert engine.global_steps == 1


def test_a_context_of_the_caller() -> None:
    """Threads of their own would not see it."""

    def run(batched: bool) -> dict[str, Any]:
        with open_engine(seeded(Stack), config_of()) as engine, torch.autocast("cpu", torch.bfloat16):
            losses = []
            batches = iter(token_batches(12))
            for _ in range(STEPS):
                if batched:
                    losses.append(engine.train_batch(batches))
                    continue
                total: Any = 0.0
                for _ in range(3):
                    loss = engine(*next(batches))
                    engine.backward(loss)
                    engine.step()
                    total = total + loss.detach()
                losses.append(total / 3)
            assert not is_vertical(engine)
            return {**outcome(engine, losses), "norms": []}

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_profiled_step_leaves_the_others_vertical(step: int) -> None:
    """`flops_profiler` counts one step, which runs as a loop."""
    config = config_of()
    profiler = config.flops_profiler.model_copy(update={"enabled": True, "profile_step": step})
    config = config.model_copy(update={"flops_profiler": profiler})
    expected = loop(Stack, config, token_batches(12), plainly)
    found, vertical = by_batches(Stack, config, token_batches(12))
    assert vertical
    assert_equal(found, expected)


def test_an_object_that_cannot_be_compared_and_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"), open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(9))
        engine.train_batch(batches)
        engine.train_batch(batches)
        engine.module.inbox = filled_queue()
        engine.train_batch(batches)
    assert any("reaches a SimpleQueue" in record.message for record in caplog.records)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_a_precision_that_is_set_by_torchs_new_names(precision: str) -> None:
    """torch's former functions raise an error then."""
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only the former functions")
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        check(Stack, config_of())
    finally:
        matmul.fp32_precision = before


def test_tiles_are_no_blocks() -> None:
    """A head of more parameters than the blocks."""

    class Tall(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 4096)
            tile(self, "64KiB")

    check(Tall, config_of())


# -- traffic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 4])
def test_parameters_move_once_a_step(accumulation: int) -> None:
    """Fetches of a step do not depend on the number of micro-batches."""

    def fetches(batched: bool) -> list[int]:
        config = config_of(accumulation, update="next_forward", prefetch_bytes=0)
        with open_engine(seeded(lambda: Stack(depth=12)), config) as engine:
            batches = iter(token_batches(6 * accumulation))
            counts = []
            for _ in range(6):
                before = engine.ledger.snapshot()
                if batched:
                    engine.train_batch(batches)
                else:
                    for _ in range(accumulation):
                        engine.backward(engine(*next(batches)))
                        engine.step()
                engine.settle()
                counts.append((engine.ledger.snapshot() - before).fetches)
            return counts

    assert fetches(True)[-1] * accumulation <= fetches(False)[-1] * 1.1


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_iterator_that_ends_early(count: int) -> None:
    with open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(count))
        if count == 5:
            engine.train_batch(batches)
        with pytest.raises(UsageError, match=f"ended after {count % 3} of 3"):
            engine.train_batch(batches)
        assert engine.micro_steps == 0
        engine.train_batch(iter(token_batches(3)))


def test_data_that_is_no_iterator() -> None:
    with open_engine(seeded(Stack), config_of()) as engine, pytest.raises(UsageError, match="iterator"):
        engine.train_batch(token_batches(3))  # type: ignore[arg-type]


def test_a_step_that_has_begun() -> None:
    with open_engine(seeded(Stack), config_of(update="next_forward")) as engine:
        batches = iter(token_batches(6))
        engine.backward(engine(*next(batches)))
        with pytest.raises(UsageError, match="after 1 of 3 micro-batches"):
            engine.train_batch(batches)
        engine.drop_gradients()
        engine.train_batch(batches)
        with engine.no_sync(), pytest.raises(UsageError, match="runs a whole step"):
            engine.train_batch(batches)


LOSSES: dict[str, Any] = {
    "NaN": lambda loss: loss * float("nan"),
    "a float": lambda loss: float(loss),
    "a vector": lambda loss: loss.expand(2),
    "without a graph": lambda loss: loss.detach(),
}


class Fails(Stack):
    """Raises in the forward, or in the backward, of the micro-batch that begins with the last token."""

    where = ""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        bad = bool(tokens[0, 0] == VOCABULARY - 1)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if bad and number == 3 and self.where == "forward":
                raise ValueError("a bad batch")
            if bad and number == 3 and self.where == "backward":
                x.register_hook(self.fail)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return LOSSES[self.where](loss) if bad and self.where in LOSSES else loss

    @staticmethod
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a bad batch")


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("where", ["forward", *LOSSES, "backward"])
def test_a_step_that_fails_leaves_no_trace(where: str, update: str) -> None:
    """The next steps have the bits of a run without it."""
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(12)]
    bad = [(tokens.clone(), targets) for tokens, targets in batches[:3]]
    bad[1][0][0, 0] = VOCABULARY - 1
    outcomes = []
    for fails in (False, True):
        with open_engine(seeded(Fails), config_of(update=update)) as engine:
            engine.module.where = where
            losses, iterator = [], iter(batches)
            for step in range(STEPS):
                if fails and step in (0, 2, 3):
                    error = NonFiniteError if where == "NaN" else UsageError if where in LOSSES else ValueError
                    with pytest.raises(error):
                        engine.train_batch(iter(bad))
                    if engine._broken:  # units had been updated
                        assert where == "backward" and update == "during_backward" and step
                        return
                losses.append(engine.train_batch(iterator))
            assert is_vertical(engine)
            outcomes.append({**outcome(engine, losses), "norms": []})
    assert_equal(*outcomes)


def test_evaluation_and_ordinary_steps_in_between() -> None:
    """Any mixture has the bits of the ordinary order."""
    expected = loop(Stack, config_of(), token_batches(15), plainly)
    expected.pop("norms")
    with open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(15))
        losses = []
        for step in range(5):
            if step == 3:
                total: Any = 0.0
                for _ in range(3):
                    loss = engine(*next(batches))
                    engine.backward(loss)
                    engine.step()
                    total = total + loss.detach()
                losses.append(total / 3)
            else:
                losses.append(engine.train_batch(batches))
            with torch.no_grad():
                engine.eval()(*token_batches(1)[0])
                engine.train()
        assert is_vertical(engine)
        found = outcome(engine, losses)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_generator_of_batches_draws_no_more_than_a_step() -> None:
    drawn = 0

    def endless() -> Iterator[Any]:
        nonlocal drawn
        while True:
            drawn += 1
            yield token_batches(1)[0]

    with open_engine(seeded(Stack), config_of()) as engine:
        batches = endless()
        for step in range(1, 4):
            engine.train_batch(batches)
            assert drawn == 3 * step


# -- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bf16": True, "clip": 0.5}], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers(name: str, checkpointed: bool, options: dict[str, Any]) -> None:
    hugging_face = pytest.importorskip("support.hugging_face")

    def make() -> nn.Module:
        model = hugging_face.MODELS[name]()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        return model  # type: ignore[no-any-return]

    batches = [{"input_ids": (ids + n) % 67, "labels": ids} for n in range(3) for (ids,) in hugging_face.BATCHES[:4]]
    config = config_of(unit_size=4000, **options)
    check(make, config, batches=batches, loss_of=lambda model, batch: model(**batch).loss)


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


class Interrupted(Stack):
    """Ctrl-C in the third block of the micro-batch that begins with the last token."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number == 3 and tokens[0, 0] == VOCABULARY - 1:
                os.kill(os.getpid(), signal.SIGINT)
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_an_interrupt_drops_the_step() -> None:
    """The step can be repeated with the same bits, and no thread is left."""
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(9)]
    bad = [(tokens.clone(), targets) for tokens, targets in batches[3:6]]
    bad[1][0][0, 0] = VOCABULARY - 1
    expected = loop(Interrupted, config_of(), batches, plainly)
    expected.pop("norms")
    with open_engine(seeded(Interrupted), config_of()) as engine:
        iterator = iter(batches)
        losses = [engine.train_batch(iterator)]
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(iter(bad))
        assert not any(thread.name == "micro-batch" for thread in threading.enumerate())
        losses += [engine.train_batch(iterator) for _ in range(2)]
        assert is_vertical(engine)
        found = outcome(engine, losses)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())

"""`engine.train_batch(blocks=...)`: a model that breaks the promise of `blocks` is an error, which changes nothing."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.engine.vertical.coroutine import Coroutine
from infinity.errors import ModelError, UsageError
from support.loops import open_engine, parameters_of
from support.models import VOCABULARY, Block, Stack, seeded, token_batches
from support.whole_steps import blocks_of, config_of


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


class Calls(Stack):
    """Calls its blocks in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)
        if self.way == "reversed":
            blocks.reverse()
        if self.way == "fewer":
            blocks.pop()
        if self.way == "sometimes fewer" and tokens[0, 0] == VOCABULARY - 1:
            blocks.pop()
        if self.way == "none":
            blocks = []
        x = self.embedding(tokens)
        for block in blocks:
            try:
                x = block(x)
            except ModelError:
                assert self.way == "reversed"  # the model's own code may catch it
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Catches(Stack):
    """The last block fails, and the model goes on without it."""

    class Failing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1] = self.Failing(32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            try:
                x = block(x)
            except ValueError:
                break
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class TakesParameter(Stack):
    class Scaling(Block):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scaling(32) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class TakesLeaf(Stack):
    """A leaf outside of the model, which all blocks use."""

    class Adding(Block):
        leaf = torch.ones(32, requires_grad=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.leaf  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Adding(32) for _ in range(6))


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Routes(Stack):
    """Micro-batches use a layer in different blocks."""

    class Routed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return self.owner[0].extra(x) if self.owner[0].at == self.number else x  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(32, 32)
        self.at = 0
        self.blocks = nn.ModuleList(self.Routed(32) for _ in range(6))
        for number, block in enumerate(self.blocks):
            block.owner, block.number = [self], number

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            self.at = int(tokens[0, 0]) % 6
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable")


class SetsVariable(Stack):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        VARIABLE.set(VARIABLE.get(0) + 1)
        return super().forward(tokens, targets)


class DrawsInBackward(Stack):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x.register_hook(lambda gradient: gradient * torch.rand(()))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Differentiates(Stack):
    """The loss contains a gradient through the blocks."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        (gradient,) = torch.autograd.grad(loss, [first], retain_graph=True, allow_unused=True)
        return loss if gradient is None else loss * (1 + gradient.norm().item())


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


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.norm(self.linear(x)))
        return found


class NormsInCheckpoints(Stack):
    """Recomputation counts the statistics of each micro-batch again, after those of all others."""

    def __init__(self) -> None:
        super().__init__(run=lambda block, x: checkpoint(block, x, use_reentrant=False))
        self.blocks = nn.ModuleList(Normed() for _ in range(6))


class SharesNorm(Stack):
    """One batch normalisation in all blocks."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Normed() for _ in range(6))
        for block in self.blocks:
            block.norm = norm


class Wraps(Stack):
    """Raises an error of its own in place of the engine's."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        try:
            for block in reversed(self.blocks):
                x = block(x)
        except Exception as error:
            raise RuntimeError("wrapped") from error
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (Skips, "a gradient reaches a block by another way"),
    (Biased, "a gradient reaches a block by another way"),
    (Repeats, r"called blocks\[0\] when all blocks had run"),
    (lambda: Calls("reversed"), r"called blocks\[5\] when blocks\[0\] was due"),
    (lambda: Calls("fewer"), r"ended before blocks\[5\] had run"),
    (lambda: Calls("sometimes fewer"), r"ended before blocks\[5\] had run"),
    (lambda: Calls("none"), r"ended before blocks\[0\] had run"),
    (Catches, r"ended before blocks\[5\] had run"),
    (Drops, "the forward draws random numbers"),
    (DrawsInBackward, "draws random numbers"),
    (reentrant, "no tensor that requires a gradient"),
    (Frozen, "leave frozen blocks in front out"),
    (TiedTwice, "used more than once"),
    (TakesParameter, "takes a parameter"),
    (TakesLeaf, "a leaf outside of the model"),
    (Routes, "micro-batches use parameters in different blocks"),
    (SetsVariable, "sets context variables"),
    (Differentiates, "computes gradients"),
    (Tags, "of a subclass or with attributes"),
    (OfClass, "of a subclass or with attributes"),
    (NormsInCheckpoints, "the backward changes the buffer"),
    (SharesNorm, "several blocks change the buffer"),
    (Wraps, r"called blocks\[5\] when blocks\[0\] was due"),
]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("make", "problem"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_model_that_breaks_the_promise(make: Callable[[], nn.Module], problem: str, debug: bool) -> None:
    """The error changes no parameter and no generator of random numbers. Steps without blocks go on."""
    batches = [(tokens.clone(), targets) for tokens, targets in token_batches(3)]
    for number, (tokens, _) in enumerate(batches):
        tokens[0, 0] = number or VOCABULARY - 1
    VARIABLE.set(0)
    with open_engine(seeded(make), config_of(debug=debug, update="next_forward")) as engine:
        before, random = parameters_of(engine), torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(ModelError, match=rf"engine.train_batch\(blocks=...\): .*{problem}"):
                engine.train_batch(iter(batches), blocks=blocks_of(engine.module))
            assert engine.global_steps == 0 and engine.micro_steps == 0
            assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        if make is not Catches:
            engine.train_batch(iter(batches))


def test_a_block_that_edits_its_input() -> None:
    """PyTorch refuses it, since the tensor is cut from the graph in front of it."""

    class Doubles(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))  # type: ignore[no-any-return]

    def make() -> nn.Module:
        model = Stack()
        model.blocks[1] = Doubles(32)
        return model

    with open_engine(seeded(make), config_of(debug=False)) as engine:
        with pytest.raises(RuntimeError, match="modified inplace"):
            engine.train_batch(iter(token_batches(3)), blocks=engine.module.blocks)
        assert engine.global_steps == 0 and engine.micro_steps == 0


BLOCKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda model: [], "got none"),
    "of another model": (lambda model: Stack().blocks, r"blocks\[0\] is not a module of the engine's model"),
    "names": (lambda model: ["blocks.0"], r"blocks\[0\] is a str, not a module"),
    "twice": (lambda model: [*model.blocks, model.blocks[2]], r"blocks\[6\] is blocks\[2\] again"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_that_are_not_of_the_model(case: str) -> None:
    """The iterator is not used."""
    make_blocks, problem = BLOCKS[case]
    with open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(3))
        with pytest.raises(UsageError, match=problem):
            engine.train_batch(batches, blocks=make_blocks(engine.module))
        engine.train_batch(batches)


def test_hooks_are_refused() -> None:
    with open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(9))
        for register, name in (
            (lambda: engine.module.blocks[2].register_forward_hook(lambda *_: None), "blocks.2"),
            (lambda: engine.module.embedding.weight.register_hook(lambda gradient: gradient), "embedding.weight"),
        ):
            handle: Any = register()  # type: ignore[no-untyped-call]
            with pytest.raises(UsageError, match=f"{name} has hooks"):
                engine.train_batch(batches, blocks=engine.module.blocks)
            handle.remove()
        engine.train_batch(batches, blocks=engine.module.blocks)


@pytest.mark.parametrize(
    "context", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, lambda: torch.device("cpu")]
)
def test_a_context_of_the_caller_is_refused(context: Callable[[], Any]) -> None:
    """Threads of their own would not see it."""
    with open_engine(seeded(Stack), config_of()) as engine:
        with context(), pytest.raises(UsageError, match="in a context of this thread"):
            engine.train_batch(iter(token_batches(3)), blocks=engine.module.blocks)
        engine.train_batch(iter(token_batches(3)), blocks=engine.module.blocks)


class Retries(Stack):
    """Calls a block again after any error, as after one of memory."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            try:
                x = block(x)
            except BaseException:  # noqa: BLE001 - as such code does
                x = block(x)
            if number == 2 and tokens[0, 0] == VOCABULARY - 1:
                raise ValueError("a bad batch")
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_a_cancelled_forward_may_call_blocks_on_its_way_out() -> None:
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(3)]
    batches[1][0][0, 0] = VOCABULARY - 1
    with open_engine(seeded(Retries), config_of()) as engine:
        with pytest.raises(ValueError, match="a bad batch"):
            engine.train_batch(iter(batches), blocks=engine.module.blocks)
        assert not [each for each in threading.enumerate() if each.name == "micro-batch"]


def test_a_forward_whose_thread_cannot_start_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Nothing(Coroutine):
        def body(self) -> None:
            pass

    coroutine = Nothing()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            coroutine.resume()
    coroutine.cancel()

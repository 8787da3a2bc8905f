"""`torch.compile` of blocks, of the model and of the engine: what the plain loop computes when it is compiled alike.

Plain loops are updated by `CPUAdam`, whose kernels are the engine's, so that results agree in every bit.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.errors import UsageError
from infinity.optim import CPUAdam
from support.loops import Batches, Result, assert_close, assert_same, parameters_of
from support.models import Block, Stack, seeded, token_batches

DEPTH = 5
LIMIT = 4
"""Graphs that Dynamo makes of one function before it gives up: fewer than there are blocks."""
NVME = {"param": "nvme", "optim": "nvme", "unit_size": 4096, "prefetch_bytes": 0}
"""Parts of blocks are units, with the least number of them resident."""
BLOCKS = {"param": "nvme", "optim": "nvme"}
"""Every block is one unit."""
MEMORY = {"param": "none", "optim": "none", "update": "next_forward"}

Backend = Any
Compile = Callable[[Any, Backend], Any]
"""A way to compile: (model or engine, backend) → the object to call."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"  # torch 2.6
    with torch._dynamo.config.patch({name: LIMIT}):
        yield
    torch._dynamo.reset()


def counting(backend: str = "aot_eager") -> CompileCounterWithBackend:
    """Return `backend` with a count of the graphs that it compiles (`frame_count`)."""
    return CompileCounterWithBackend(backend)


def plain(model: nn.Module, called: Any, batches: Batches, lr: float = 1e-3) -> Result:
    """Return losses and parameters of a loop without an engine, updated as by `engine_config`."""
    optimizer = CPUAdam(model.parameters(), lr=lr, weight_decay=0.01, threads=1)
    losses = []
    for batch in batches:
        loss = called(*batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    names = {name.replace("_orig_mod.", ""): p.detach().clone() for name, p in model.named_parameters()}
    return Result(losses, names)


def trained(
    engine: Any, called: Any, batches: Batches, graphs: Callable[[], int] = lambda: 0
) -> tuple[Result, list[int]]:
    """Return losses and parameters with an engine, and the number of graphs after every step."""
    losses, compiled = [], []
    for batch in batches:
        loss = called(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        compiled.append(graphs())
    return Result(losses, parameters_of(engine)), compiled


class Uncompiled:
    """Replaces an engine in the plain loop."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *batch: torch.Tensor) -> Any:
        return self.module(*batch)


def stack() -> Stack:
    return seeded(lambda: Stack(depth=DEPTH))


def model_wrapped(model: Stack, backend: Backend) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
    return compiled


def model_in_place(model: Stack, backend: Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks_in_place(model: Stack, backend: Backend) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def blocks_wrapped(model: Stack, backend: Backend) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


def forwards_wrapped(model: Stack, backend: Backend) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    return model


def engine_itself(engine: Any, backend: Backend) -> Any:
    return torch.compile(engine, backend=backend)


def module_of_engine(engine: Any, backend: Backend) -> Any:
    return torch.compile(engine.module, backend=backend)


def module_of_engine_in_place(engine: Any, backend: Backend) -> Any:
    engine.module.compile(backend=backend)
    return engine


def blocks_of_engine(engine: Any, backend: Backend) -> Any:
    blocks_in_place(engine.module, backend)
    return engine


def forwards_of_engine(engine: Any, backend: Backend) -> Any:
    forwards_wrapped(engine.module, backend)
    return engine


def function_of_engine(engine: Any, backend: Backend) -> Any:
    def doubled(*batch: torch.Tensor) -> Any:
        return engine(*batch) * 2.0

    return torch.compile(doubled, backend=backend)


BEFORE = [model_wrapped, model_in_place, blocks_in_place, blocks_wrapped, forwards_wrapped]
AFTER = [
    engine_itself,
    module_of_engine,
    module_of_engine_in_place,
    blocks_of_engine,
    forwards_of_engine,
    function_of_engine,
]


@functools.cache
def plainly(compile_: Compile) -> Result:
    """The plain loop with a `stack()` compiled by one of `BEFORE` or `AFTER`, over `token_batches(3)`."""
    model = stack()
    result = plain(model, compile_(model if compile_ in BEFORE else Uncompiled(model), "aot_eager"), token_batches(3))
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize("options", [NVME, MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("compile_", BEFORE)
def test_compiled_before_initialize_as_the_plain_loop_compiled(
    make_engine: OpenEngine, compile_: Compile, options: dict[str, Any]
) -> None:
    """A model compiled in each of PyTorch's ways and then given to an engine trains alike, and is not recompiled after
    the first steps. It has more blocks than Dynamo's recompile limit; they share graphs.
    """
    expected = plainly(compile_)
    backend = counting()
    engine = make_engine(compile_(stack(), backend), **options)
    result, graphs = trained(engine, engine, token_batches(3), lambda: backend.frame_count)
    assert_same(result, expected)
    assert 1 <= graphs[1] == graphs[-1] <= 4, graphs


@pytest.mark.parametrize("options", [NVME, MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("compile_", AFTER)
def test_compiled_after_initialize_as_the_plain_loop_compiled(
    make_engine: OpenEngine, compile_: Compile, options: dict[str, Any]
) -> None:
    """Training is the same if the engine, its module, its blocks or a function that calls it is compiled later."""
    expected = plainly(compile_)
    backend = counting()
    engine = make_engine(stack(), **options)
    result, graphs = trained(engine, compile_(engine, backend), token_batches(3), lambda: backend.frame_count)
    assert_same(result, expected)
    assert 1 <= graphs[1] == graphs[-1] <= 4, graphs


@pytest.mark.parametrize("in_place", [True, False])
def test_fullgraph_blocks_that_are_a_unit_each(make_engine: OpenEngine, in_place: bool) -> None:
    """Blocks that are one unit each can be compiled with fullgraph=True, as in torchtitan: fetches are outside."""

    def compile_(model: Stack, backend: Backend) -> nn.Module:
        for number, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend=backend, fullgraph=True)
            else:
                model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[assignment]
        return model

    batches = token_batches(3)
    model = stack()
    expected = plain(model, compile_(model, "aot_eager"), batches)
    torch._dynamo.reset()
    backend = counting()
    engine = make_engine(compile_(stack(), backend), **BLOCKS)
    result, graphs = trained(engine, engine, batches, lambda: backend.frame_count)
    assert_same(result, expected)
    assert graphs == [1, 1, 1]


def test_fullgraph_over_units_is_one_clear_error(make_engine: OpenEngine) -> None:
    """fullgraph=True over several units or over the engine raises PyTorch's error, with the reason and the fix."""
    model = stack()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    engine = make_engine(model, **NVME)
    whole: Any = torch.compile(engine, backend="aot_eager", fullgraph=True)
    named = "reason" in inspect.signature(torch._dynamo.disable).parameters  # torch 2.6 has no place for it
    said = r"Infinity engine fetches.*infinity\.unit_size" if named else r"torch\._dynamo\.disable\(\)"
    for called in (engine, whole):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
            called(*token_batches(1)[0])


@pytest.mark.parametrize("own_backward", [True, False])
def test_compiled_autograd_is_refused(make_engine: OpenEngine, own_backward: bool) -> None:
    """Compiled autograd is one clear error in forward and in either backward; training goes on once it is off."""
    batches = token_batches(2)
    options = {**NVME, "update": "next_forward"}
    engine = make_engine(stack(), **options)
    expected, _ = trained(engine, engine, batches)
    engine = make_engine(stack(), **options)
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(UsageError, match=r"Compiled autograd.*off"):
        engine(*batches[0])
    loss = engine(*batches[0])
    # Later than 2.6, PyTorch puts an error of its own in the place of ours, which says the same.
    kinds = (UsageError,) if own_backward else (UsageError, NotImplementedError)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(kinds, match=r"(?i)compiled autograd"),
    ):
        engine.backward(loss) if own_backward else loss.backward()
    result, _ = trained(engine, engine, batches)
    assert_same(result, expected)


@pytest.mark.parametrize("own", [True, False])
def test_compiled_training_step(make_engine: OpenEngine, own: bool) -> None:
    """A whole step in one compiled function, with the engine's backward and step or PyTorch's."""
    expected = plainly(model_wrapped)
    engine = make_engine(stack(), **NVME)

    @torch.compile(backend="aot_eager")
    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = engine(*batch) if own else engine.module(*batch)
        if own:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return loss.detach()

    losses = [step(*batch).item() for batch in token_batches(3)]
    assert_same(Result(losses, parameters_of(engine)), expected)


# -- models and loops -------------------------------------------------------------------------------------------------

Loop = Callable[[Any], list[float]]
"""(engine, or what stands for it in the plain loop) → losses."""


class PlainEngine(Uncompiled):
    """The calls of an engine, by the plain loop."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.optimizer = CPUAdam(module.parameters(), lr=1e-3, weight_decay=0.01, threads=1)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps(engine: Any, batches: Batches, called: Any = None) -> list[float]:
    losses = []
    for batch in batches:
        loss = (called or engine)(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def three_steps(engine: Any) -> list[float]:
    return steps(engine, token_batches(3))


def assert_as_plain(
    make_engine: OpenEngine, make: Callable[[], Stack], run: Loop = three_steps, **options: Any
) -> None:
    """`run` with an engine gives what it gives with the plain loop. make: a model, compiled or not."""
    model = seeded(make)
    torch.manual_seed(1)
    losses = run(PlainEngine(model))
    expected = Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})
    torch._dynamo.reset()
    engine = make_engine(seeded(make), **options)
    torch.manual_seed(1)
    losses = run(engine)
    assert_same(Result(losses, parameters_of(engine)), expected)


def compiled_blocks(make: Callable[[], Stack], backend: Backend = "aot_eager", **options: Any) -> Callable[[], Stack]:
    def compiled() -> Stack:
        model = make()
        for block in model.blocks:
            block.compile(backend=backend, **options)
        return model

    return compiled


class OfBlocks(Stack):
    """A stack of three blocks of a kind."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(depth=1)
        self.blocks = nn.ModuleList(kind(32) for _ in range(3))


class Offloading:
    """Saved-tensor hooks like those of activation offloading, which pass parameters through unchanged."""

    def pack(self, tensor: torch.Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else [tensor.clone()]

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed[0] if isinstance(packed, list) else packed
        return tensor


def offloading() -> Any:
    hooks = Offloading()
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


@pytest.mark.parametrize(("kept", "hooked"), [(True, False), (False, False), (True, True)])
def test_parameters_read_by_a_compiled_function(make_engine: OpenEngine, kept: bool, hooked: bool) -> None:
    """Parameters that a compiled function reads outside of the model's forward, looked up there or closed over, and
    under saved-tensor hooks.
    """

    def run(engine: Any) -> list[float]:
        params = [*engine.module.blocks[0].parameters(), engine.module.head.weight]

        @torch.compile(backend="eager")
        def penalty() -> torch.Tensor:
            module = engine.module
            found = params if kept else [module.blocks[0].up.weight, module.blocks[-1].norm.bias, module.head.weight]
            total = torch.zeros(())
            for parameter in found:
                total = total + (parameter * parameter).sum()
            return total

        def called(*batch: torch.Tensor) -> Any:
            with offloading() if hooked else nullcontext():
                extra = penalty()
            return engine(*batch) + 0.01 * extra

        return steps(engine, token_batches(3), called)

    assert_as_plain(make_engine, lambda: Stack(depth=3), run, **NVME)


@pytest.mark.parametrize("options", [NVME, BLOCKS, MEMORY], ids=["nvme", "blocks", "memory"])
def test_function_that_closes_over_parameters_in_forward(make_engine: OpenEngine, options: dict[str, Any]) -> None:
    """A compiled function of several units' parameters, kept since before `initialize` and called in forward."""

    class Regularised(Stack):
        def __init__(self) -> None:
            super().__init__(depth=3)
            head, norm, up = self.head.weight, self.blocks[0].norm.weight, self.blocks[-1].up.weight
            self.penalty = torch.compile(
                lambda: head.square().mean() + (norm * norm).sum() + (up.t() @ up).sum(), backend="aot_eager"
            )

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) + 0.001 * self.penalty()

    assert_as_plain(make_engine, Regularised, **options)


@pytest.mark.parametrize("compile_", [model_wrapped, blocks_in_place])
def test_parameters_read_outside_of_their_module(make_engine: OpenEngine, compile_: Compile) -> None:
    """Weights that compiled code reads from other modules, whose units it does not hold: not from graph inputs."""

    class Outside(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x) + self.blocks[0].down.bias * self.blocks[-1].norm.weight
            logits = F.linear(x, self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.head.weight.square().mean()

    batches = token_batches(3)
    model = seeded(lambda: Outside(depth=3))
    expected = plain(model, compile_(model, "aot_eager"), batches)
    torch._dynamo.reset()
    engine = make_engine(compile_(seeded(lambda: Outside(depth=3)), "aot_eager"), **NVME)
    result, _ = trained(engine, engine, batches)
    assert_same(result, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(make_engine: OpenEngine, reentrant: bool) -> None:
    """Compiled blocks that are recomputed in backward."""

    def make() -> Stack:
        return Stack(depth=3, run=lambda block, x: checkpoint(block, x, use_reentrant=reentrant))

    assert_as_plain(make_engine, compiled_blocks(make), **NVME)


class Recomputed(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + checkpoint(self.body, x, use_reentrant=False)
        return out


def test_checkpoint_within_a_graph(make_engine: OpenEngine) -> None:
    """Blocks of one graph each, with a checkpoint inside."""
    assert_as_plain(make_engine, compiled_blocks(lambda: OfBlocks(Recomputed), fullgraph=True), **BLOCKS)


@pytest.mark.filterwarnings("ignore:something still refers to the parameters of unit")
@pytest.mark.parametrize("around", ["model", "block", "part"])
def test_saved_tensor_hooks_around_compiled_code(make_engine: OpenEngine, around: str) -> None:
    """Hooks that keep the parameters passed to them; those of a part of a unit may not keep them until backward."""

    class Parted(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.part = torch.compile(self.transformed, backend="aot_eager")

        def transformed(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
            return out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with offloading() if around == "part" else nullcontext():
                return x + self.part(x)

    def make() -> Stack:
        model = OfBlocks(Parted)

        def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with offloading():
                out: torch.Tensor = block(x)
            return out

        if around == "block":
            model.run = run_block
        return model

    def run(engine: Any) -> list[float]:
        with offloading() if around == "model" else nullcontext():
            return three_steps(engine)

    assert_as_plain(make_engine, make, run, **BLOCKS, prefetch_bytes=0)


class Edited(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm.weight.clamp_(0.9995, 1.0005)
        self.up.weight.data.mul_(0.999)
        return super().forward(x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Custom(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Product.apply(self.norm(x), self.up.weight)  # type: ignore[no-untyped-call]
        out: torch.Tensor = x + self.down(F.gelu(hidden + self.up.bias))
        return out


@pytest.mark.parametrize("kind", [Edited, Custom])
@pytest.mark.parametrize("options", [NVME, BLOCKS], ids=["nvme", "blocks"])
def test_compiled_blocks_of_other_kinds(make_engine: OpenEngine, kind: type[Block], options: dict[str, Any]) -> None:
    """Parameters that compiled code edits, or saves for backward itself."""
    assert_as_plain(make_engine, compiled_blocks(lambda: OfBlocks(kind)), **options)


def test_autocast(make_engine: OpenEngine) -> None:
    """torch.autocast around a compiled model, and inside of the compiled function."""

    def run(engine: Any) -> list[float]:
        def called(*batch: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return engine(*batch)

        return steps(engine, token_batches(2), called) + steps(
            engine, token_batches(2), torch.compile(called, backend="aot_eager")
        )

    assert_as_plain(make_engine, compiled_blocks(lambda: Stack(depth=2)), run, **NVME)


def test_threads_and_evaluation(make_engine: OpenEngine) -> None:
    """Graphs made in one thread are used in others, one after another, with evaluation in between."""

    def run(engine: Any) -> list[float]:
        losses: list[float] = []

        def evaluate() -> None:
            engine.module.eval()
            with torch.inference_mode():
                losses.append(engine(*token_batches(1, seed=2)[0]).item())
            engine.module.train()

        def train() -> None:
            losses.extend(steps(engine, token_batches(2)))

        for work in (train, evaluate, train, evaluate):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        evaluate()
        train()
        assert len(losses) == 9
        return losses

    assert_as_plain(make_engine, compiled_blocks(lambda: Stack(depth=3)), run, **NVME)


def test_several_sequence_lengths(make_engine: OpenEngine) -> None:
    """Batches of several lengths: dynamic shapes from the second length on, or at once with dynamic=True."""
    batches = [batch for length in (8, 11, 5) for batch in token_batches(1, length=length)]
    model = stack()
    expected = plain(model, blocks_in_place(model, "aot_eager"), batches)
    for dynamic, last in (None, 1), (True, 0):
        torch._dynamo.reset()
        backend = counting()
        engine = make_engine(compiled_blocks(stack, backend, dynamic=dynamic)(), **BLOCKS)
        result, graphs = trained(engine, engine, batches, lambda backend=backend: backend.frame_count)  # type: ignore[misc]
        assert_same(result, expected)
        assert graphs[last] == graphs[-1] <= 2  # at once, torch 2.6 makes one
        engine.close()


@pytest.mark.campaign  # compiles for 20 seconds
@pytest.mark.parametrize("options", [pytest.param(BLOCKS, marks=pytest.mark.slow), NVME], ids=["blocks", "nvme"])
def test_inductor_within_its_tolerance(make_engine: OpenEngine, options: dict[str, Any]) -> None:
    """Blocks compiled by inductor. If parts of a block are units, its kernels and their rounding differ."""
    batches = token_batches(3)
    model = seeded(lambda: Stack(depth=2))
    expected = plain(model, blocks_in_place(model, "inductor"), batches)
    torch._dynamo.reset()
    engine = make_engine(blocks_in_place(seeded(lambda: Stack(depth=2)), "inductor"), **options)  # type: ignore[arg-type]
    result, _ = trained(engine, engine, batches)
    assert_close(result, expected)


def test_compiled_models_have_the_names_of_their_own(make_engine: OpenEngine, tmp_path: Any) -> None:
    """Parameters and buffers in units, state_dict() and checkpoints have names without the wrapper's `_orig_mod`."""

    class WithBuffer(Stack):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.blocks[0].register_buffer("scale", torch.ones(3))

    names = seeded(WithBuffer).state_dict().keys()
    model = seeded(WithBuffer)
    engine = make_engine(model_wrapped(blocks_wrapped(model, "aot_eager"), "aot_eager"), **NVME)  # type: ignore[arg-type]
    assert engine.module is model
    assert engine.state_dict().keys() == names
    assert not any("_orig_mod" in unit.name for unit in engine.units)
    trained(engine, engine, token_batches(2))
    values = engine.state_dict()
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.close()
    other = make_engine(seeded(WithBuffer, 1), **NVME)
    other.load_checkpoint(tmp_path / "checkpoint")
    for name, value in other.state_dict().items():
        assert torch.equal(value, values[name]), name

"""`torch.compile` of blocks, of the model and of the engine: what the plain loop computes when it is compiled alike.

Plain loops are updated by `CPUAdam`, whose kernels are the engine's, so that results agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from conftest import OpenEngine
from infinity.errors import UsageError
from infinity.optim import CPUAdam
from support.loops import Batches, Result, assert_same, parameters_of
from support.models import Stack, seeded, token_batches

DEPTH = 10  # more blocks than torch._dynamo.config.recompile_limit
NVME = {"param": "nvme", "optim": "nvme", "unit_size": 4096, "prefetch_bytes": 0}
"""Parts of blocks are units, and no more of them are resident than must be."""
BLOCKS = {"param": "nvme", "optim": "nvme"}
"""Every block is one unit."""
MEMORY = {"param": "none", "optim": "none"}

Backend = Any
Compile = Callable[[Any, Backend], Any]
"""What is compiled in which way, as (model or engine, backend) → what is to be called."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(backend: str = "aot_eager") -> CompileCounterWithBackend:
    """`backend`, which counts the graphs that it compiles (`frame_count`)."""
    return CompileCounterWithBackend(backend)


def plain(model: nn.Module, called: Any, batches: Batches, lr: float = 1e-3) -> Result:
    """The losses and parameters of a loop without an engine, updated as by `engine_config`."""
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
    """The same with an engine, and the number of graphs after every step."""
    losses, compiled = [], []
    for batch in batches:
        loss = called(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        compiled.append(graphs())
    return Result(losses, parameters_of(engine)), compiled


class Uncompiled:
    """Stands for an engine in the plain loop."""

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


@pytest.mark.parametrize("options", [NVME, MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("compile_", BEFORE)
def test_compiled_before_initialize_as_the_plain_loop_compiled(
    make_engine: OpenEngine, compile_: Compile, options: dict[str, Any]
) -> None:
    """A model compiled in any of PyTorch's ways and then given to an engine, and no graph anew after the first steps:
    more blocks than Dynamo's limit share theirs.
    """
    batches = token_batches(5)
    model = stack()
    expected = plain(model, compile_(model, "aot_eager"), batches)
    torch._dynamo.reset()
    backend = counting()
    engine = make_engine(compile_(stack(), backend), **options)
    result, graphs = trained(engine, engine, batches, lambda: backend.frame_count)
    assert_same(result, expected)
    assert 1 <= graphs[1] == graphs[-1] <= 4, graphs


@pytest.mark.parametrize("options", [NVME, MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("compile_", AFTER)
def test_compiled_after_initialize_as_the_plain_loop_compiled(
    make_engine: OpenEngine, compile_: Compile, options: dict[str, Any]
) -> None:
    """The engine, its module, its blocks, or a function that calls it, compiled while the engine is open."""
    batches = token_batches(5)
    model = stack()
    expected = plain(model, compile_(Uncompiled(model), "aot_eager"), batches)
    torch._dynamo.reset()
    backend = counting()
    engine = make_engine(stack(), **options)
    result, graphs = trained(engine, compile_(engine, backend), batches, lambda: backend.frame_count)
    assert_same(result, expected)
    assert 1 <= graphs[1] == graphs[-1] <= 4, graphs


@pytest.mark.parametrize("in_place", [True, False])
def test_fullgraph_blocks_that_are_a_unit_each(make_engine: OpenEngine, in_place: bool) -> None:
    """Blocks compiled with fullgraph=True, as torchtitan does: what fetches them is outside of the graph."""

    def compile_(model: Stack, backend: Backend) -> nn.Module:
        for number, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend=backend, fullgraph=True)
            else:
                model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[assignment]
        return model

    batches = token_batches(4)
    model = stack()
    expected = plain(model, compile_(model, "aot_eager"), batches)
    torch._dynamo.reset()
    backend = counting()
    engine = make_engine(compile_(stack(), backend), **BLOCKS)
    result, graphs = trained(engine, engine, batches, lambda: backend.frame_count)
    assert_same(result, expected)
    assert graphs == [1, 1, 1, 1]


def test_fullgraph_over_units_is_one_clear_error(make_engine: OpenEngine) -> None:
    """fullgraph=True over modules that are units by themselves: PyTorch's error, with the reason and what to do."""
    model = stack()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    engine = make_engine(model, **NVME)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Infinity engine fetches.*infinity\.unit_size"):
        engine(*token_batches(1)[0])


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
    # PyTorch puts an error of its own in the place of ours, which says the same.
    kind, text = (UsageError, "Compiled autograd .*") if own_backward else (NotImplementedError, "compiled autograd")
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")), pytest.raises(kind, match=text):
        engine.backward(loss) if own_backward else loss.backward()
    result, _ = trained(engine, engine, batches)
    assert_same(result, expected)


def test_compiled_models_have_the_names_of_their_own(make_engine: OpenEngine, tmp_path: Any) -> None:
    """Names of parameters and buffers, in units, state_dict() and checkpoints, without the wrapper's `_orig_mod`."""

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

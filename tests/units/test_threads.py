"""Engines may be used in any thread, one at a time: forward, backward and step run in the calling thread."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from support.beside import LATE_TOO, NVME, PLACES, EngineLoop, PlainLoop, assert_like, assert_same_story, training
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine, parameters_of
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = vector_batches(6)
Call = Callable[..., Any]


def in_thread(call: Call, *args: Any) -> Any:
    """Run `call(*args)` in a new thread and raise its error here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def here(call: Call, *args: Any) -> Any:
    return call(*args)


def by_asyncio(call: Call, *args: Any) -> Any:
    return asyncio.run(asyncio.to_thread(call, *args))


@LATE_TOO
@pytest.mark.parametrize("run", [in_thread, by_asyncio])
def test_the_whole_training_in_a_thread(run: Call, place: dict[str, Any]) -> None:
    assert_same_story(Linears, lambda loop: run(training(BATCHES), loop), place=place, units=8)


PLANS: dict[str, tuple[Call, Call, Call]] = {
    "backward elsewhere": (here, in_thread, here),
    "forward elsewhere": (in_thread, here, here),
    "step elsewhere": (here, here, in_thread),
    "each in another": (in_thread, in_thread, in_thread),
    "asyncio": (by_asyncio, here, by_asyncio),
}


@LATE_TOO
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_parts_of_a_step_in_other_threads(update: str, plan: str, place: dict[str, Any]) -> None:
    forward, backward, step = PLANS[plan]

    def story(loop: Any) -> list[float]:
        seen = []
        for batch in BATCHES:
            loss = forward(loop.model, *batch)
            backward(loop.backward, loss)
            step(loop.step)
            seen.append(loss.item())
        return seen

    assert_same_story(Linears, story, place={**place, "update": update}, units=8)


@PLACES
@pytest.mark.parametrize("reentrant", [True, False])
def test_alternating_threads(reentrant: bool, place: dict[str, Any]) -> None:
    """Steps may alternate between threads of a pool, with checkpoints, penalties and edits."""

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return out

    def story(loop: Any) -> list[float]:
        def step(batch: Any) -> float:
            loss = loop.model(*batch) + 1e-3 * loop.model.blocks[1].up.weight.square().sum()
            loop.backward(loss)
            loop.step()
            with torch.no_grad():
                loop.model.head.weight.clamp_(-0.15, 0.15)
            return float(loss.detach())

        with ThreadPoolExecutor(3) as pool:
            return [pool.submit(step, batch).result() for batch in token_batches(6)]

    assert_same_story(lambda: Stack(run=run), story, place={**place, "unit_size": 100_000}, units=8)


def test_an_engine_that_is_made_in_a_thread() -> None:
    """An engine made in one thread can be trained in another and closed in a third."""
    config = engine_config(**NVME)
    reference = PlainLoop(seeded(Linears), config)
    expected = training(BATCHES)(reference)
    engine: TrainingEngine = in_thread(open_engine, seeded(Linears), config)
    found = training(BATCHES)(EngineLoop(engine))
    assert_like(found, expected)
    assert_like(parameters_of(engine), {n: p.detach() for n, p in reference.model.named_parameters()})
    in_thread(engine.close)
    with pytest.raises(UsageError, match="closed"):
        engine(*BATCHES[0])
    engine.close()


def test_close_while_another_thread_has_used_it(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Linears), param="none", optim="none")
    in_thread(training(BATCHES[:3]), EngineLoop(engine))
    values = parameters_of(engine)
    in_thread(engine.close)
    assert_like({n: p.detach() for n, p in engine.module.named_parameters()}, values)


class Waiting(Linears):
    """Blocks in the middle of a forward until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.waits = False

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.waits:
            x = self.layers[0](x)
            self.reached.set()
            assert self.go_on.wait(30)
        return super().forward(x, targets)


@PLACES
@pytest.mark.parametrize("second", ["forward", "part", "parameter"])
def test_two_threads_at_once(second: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """A second thread is refused by name, the first goes on, and later training equals the plain loop."""
    config = engine_config(**place)
    reference = PlainLoop(seeded(Waiting), config)
    expected = training(BATCHES)(reference)
    engine = make_engine(seeded(Waiting), config)
    loop, model = EngineLoop(engine), engine.module
    kept = model.layers[3].weight
    seen: list[Any] = training(BATCHES[:2])(loop)
    model.waits = True
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(model, *BATCHES[0])
        assert model.reached.wait(30)
        attempts: dict[str, Call] = {
            "forward": lambda: engine(*BATCHES[1]),
            "part": lambda: model.layers[2](BATCHES[1][0]),
            "parameter": lambda: kept.sum(),
        }
        for _ in range(3):
            with pytest.raises(UsageError, match="another thread"):
                attempts[second]()
        model.go_on.set()
        assert first.result().isfinite()
    model.waits = False
    del first
    seen += training(BATCHES[2:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)


@PLACES
def test_a_thread_that_races(place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Two threads that race for the model get results or errors by name, and training goes on afterwards."""
    config = engine_config(**place)
    reference = PlainLoop(seeded(Linears), config)
    expected = training(BATCHES)(reference)
    engine = make_engine(seeded(Linears), config)
    loop = EngineLoop(engine)
    seen = training(BATCHES[:3])(loop)
    with torch.no_grad():
        value = engine(*BATCHES[0]).item()
    found: list[float] = []
    errors: list[BaseException] = []

    def evaluate() -> None:
        for _ in range(60):
            try:
                with torch.no_grad():
                    found.append(engine(*BATCHES[0]).item())
            except UsageError as error:
                errors.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=evaluate) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) + len(errors) == 180
    assert set(found) <= {value}
    assert all("another thread" in str(error) for error in errors)
    seen += training(BATCHES[3:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)

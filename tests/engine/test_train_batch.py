"""`engine.train_batch`: its iterator, and steps that fail, in both orders."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.errors import NonFiniteError, UsageError
from support.loops import open_engine
from support.models import VOCABULARY, Stack, seeded, token_batches
from support.whole_steps import STEPS, check, config_of, loop, outcome, plainly


def blocks_if(declared: bool, engine: TrainingEngine) -> nn.ModuleList | None:
    return engine.module.blocks if declared else None  # type: ignore[return-value]


def test_without_blocks_a_step_is_that_of_a_loop() -> None:
    """Also for a model that draws random numbers."""

    class Drops(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) * F.dropout(torch.ones(()), 0.1)

    for make in (Stack, Drops):
        torch.manual_seed(3)
        expected = loop(make, config_of(), token_batches(STEPS * 3), plainly)
        torch.manual_seed(3)
        with open_engine(seeded(make), config_of()) as engine:
            batches = iter(token_batches(STEPS * 3))
            found = outcome(engine, [engine.train_batch(batches) for _ in range(STEPS)])
        assert all(torch.equal(value, found[name]) for name, value in expected.items() if name != "norms")


def test_one_micro_batch_a_step() -> None:
    check(Stack, config_of(1), reason="gradient_accumulation_steps is 1")


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


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("where", ["forward", *LOSSES, "backward"])
def test_a_step_that_fails_leaves_no_trace(where: str, update: str, declared: bool) -> None:
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
                        engine.train_batch(iter(bad), blocks=blocks_if(declared, engine))
                    if engine._broken:  # units had been updated
                        assert where == "backward" and update == "during_backward" and step
                        return
                losses.append(engine.train_batch(iterator, blocks=blocks_if(declared, engine)))
            outcomes.append(outcome(engine, losses))
    assert all(torch.equal(value, outcomes[1][name]) for name, value in outcomes[0].items())


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
                losses.append(engine.train_batch(batches, blocks=blocks_if(step != 2, engine)))
            with torch.no_grad():
                engine.eval()(*token_batches(1)[0])
                engine.train()
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
        losses = [engine.train_batch(iterator, blocks=engine.module.blocks)]
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(iter(bad), blocks=engine.module.blocks)
        assert not any(thread.name == "micro-batch" for thread in threading.enumerate())
        losses += [engine.train_batch(iterator, blocks=engine.module.blocks) for _ in range(2)]
        found = outcome(engine, losses)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())

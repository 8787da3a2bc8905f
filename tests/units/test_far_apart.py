"""Large units that are far apart in the model, such as an embedding and a head, take turns in one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.inference import InferenceEngine
from infinity.engine.training import TrainingEngine
from infinity.plan.pools import UNITS
from support.beside import LATE_TOO, MEMORY, SCHEDULES, assert_same_story, training
from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded

WORDS, WIDTH, LAYERS = 2048, 48, 12
LARGE = 4 * WORDS * WIDTH
SMALL = {"unit_size": 4096, "prefetch_bytes": 32 << 10}


class Words(nn.Module):
    """Layers between tables that are the largest units; tables: their indices among the layers."""

    def __init__(self, tables: tuple[int, ...] = (0, LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Embedding(WORDS, WIDTH) if number in tables else nn.Linear(WIDTH, WIDTH) for number in range(LAYERS + 1)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: Any = 0.0
        for layer in self.layers:
            hidden = hidden + layer(tokens) if isinstance(layer, nn.Embedding) else torch.tanh(layer(hidden))
        return hidden.square().mean()


BATCHES = [(torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]


def opened(*tables: int) -> TrainingEngine:
    return open_engine(seeded(lambda: Words(tables)), engine_config(**SMALL))


def large_buffers(engine: TrainingEngine | InferenceEngine) -> int:
    return engine.parts.pools[UNITS].count(LARGE)


def evaluate(loop: Any, number: int) -> float:
    with torch.no_grad():
        return float(loop.model(*BATCHES[number]))


@LATE_TOO
@SCHEDULES
@pytest.mark.parametrize("prefetch_bytes", [0, 32 << 10])
def test_they_train_as_in_a_plain_loop(update: str, place: dict[str, Any], prefetch_bytes: int) -> None:
    options = {} if place is MEMORY else {"prefetch_bytes": prefetch_bytes}
    assert_same_story(Words, training(BATCHES, evaluate), place=place, update=update, units=LAYERS, **options)


def test_one_buffer_serves_two_that_are_never_together() -> None:
    with opened(0, LAYERS) as engine:
        assert large_buffers(engine) == 1
    with opened(0, 1, LAYERS) as engine:
        assert large_buffers(engine) == 2


def test_a_call_after_a_call_prefetches_the_first_beside_the_last() -> None:
    model = seeded(Words)
    expected = model(*BATCHES[0])
    with infinity.init_inference(model, engine_config(**SMALL)) as engine:
        assert large_buffers(engine) == 2
        for _ in range(3):
            assert torch.equal(engine(*BATCHES[0]), expected)


def test_more_of_them_are_gathered_in_buffers_of_their_own() -> None:
    with opened(0, 4, 8) as engine:
        tables = [layer.weight for layer in engine.module.layers if isinstance(layer, nn.Embedding)]
        pool = engine.parts.pools[UNITS]
        before = pool.nbytes
        with infinity.GatheredParameters(tables, modifier_rank=0), torch.no_grad():
            assert pool.nbytes == before + 2 * LARGE
            values = torch.stack([table.sum() for table in tables])
            tables[1].add_(1)
        assert pool.nbytes == before
        with infinity.GatheredParameters(tables):
            sums = torch.stack([table.sum() for table in tables])
        torch.testing.assert_close(sums - values, torch.tensor([0.0, WORDS * WIDTH, 0.0]), rtol=1e-4, atol=1e-2)


def test_any_number_of_them_is_gathered() -> None:
    with opened(0, 4, 8, 12) as engine:
        tables = [layer.weight for layer in engine.module.layers if isinstance(layer, nn.Embedding)]
        pool = engine.parts.pools[UNITS]
        before = pool.nbytes
        with infinity.GatheredParameters(tables):
            assert pool.nbytes == before + 3 * LARGE
        assert pool.nbytes == before

"""Gradients that an exception leaves in `.grad`, before the engine's hook takes them, do not count in the next step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity.engine.training import TrainingEngine
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import Stack, seeded, token_batches


def trained(
    folder: Path, layer: str, again: Callable[[TrainingEngine], None] | None
) -> tuple[list[float], list[float]]:
    """Train four steps. again: called after an exception in the third, whose backward is then repeated."""
    model, fails = seeded(lambda: Stack(depth=3)), [False]

    def fail(parameter: torch.Tensor) -> None:
        if fails[0]:
            fails[0] = False
            raise ZeroDivisionError

    model.get_parameter(layer).register_post_accumulate_grad_hook(fail)
    norms = []
    with open_engine(model, engine_config(folder=folder, clip=1e9)) as engine:
        for number, batch in enumerate(token_batches(4)):
            fails[0] = again is not None and number == 2
            try:
                engine.backward(engine(*batch))
            except ZeroDivisionError:
                assert again is not None
                again(engine)
                engine.backward(engine(*batch))
            engine.step()
            norms.append(engine.grad_norm or 0.0)
        return norms, [float(value.double().sum()) for value in parameters_of(engine).values()]


@pytest.mark.parametrize("layer", ["head.weight", "blocks.1.up.weight", "embedding.weight"])
@pytest.mark.parametrize(
    "again",
    [lambda engine: None, TrainingEngine.drop_gradients, lambda engine: engine.optimizer.zero_grad()],
    ids=["nothing", "drop_gradients", "zero_grad"],
)
def test_a_step_is_repeated_after_an_exception_in_a_hook(
    layer: str, again: Callable[[TrainingEngine], None], tmp_path: Path
) -> None:
    assert trained(tmp_path, layer, again) == trained(tmp_path, layer, None)


@pytest.mark.parametrize("speculate", ["auto", False])
def test_a_limit_that_no_norm_reaches(speculate: object, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, clip=sys.float_info.max, speculate=speculate)
    with open_engine(seeded(lambda: Stack(depth=3)), config) as engine:
        for batch in token_batches(3):
            engine.backward(engine(*batch))
            engine.step()
        assert engine.grad_norm and engine.grad_norm > 0

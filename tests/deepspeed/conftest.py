"""Fixtures of DeepSpeed's surface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import infinity.deepspeed as deepspeed
from support.models import Stack, seeded

Opens = Callable[..., Any]


@pytest.fixture
def opens() -> Iterator[Opens]:
    """Open an engine for a model of several units: `opens(stage=2, **config)`. All are destroyed at the end."""
    engines: list[Any] = []

    def open_(stage: int = 0, model: nn.Module | None = None, given: dict[str, Any] | None = None, **top: Any) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "infinity": {"unit_size": 20_000},
            **top,
        }
        config["zero_optimization"] = {"stage": stage, **top.get("zero_optimization", {})}
        model = model if model is not None else seeded(Stack)
        engine, *_ = deepspeed.initialize(model=model, config=config, **(given or {}))
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.destroy()

"""Public names of DeepSpeed 0.19.8's engine: all are present, and those without a counterpart raise by name.

engine_names.json holds the public methods and properties of `DeepSpeedEngine` in deepspeed/runtime/engine.py, extracted
with `ast` from the release on PyPI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.engine_names import GETTERS, REFUSED
from infinity.errors import UsageError

NAMES = json.loads((Path(__file__).parent / "engine_names.json").read_text())["methods"]
PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"


def test_every_name_of_deepspeeds_engine_is_there() -> None:
    """The engine has all 180 names, as methods or properties of its classes."""
    assert len(NAMES) == 180
    assert [name for name in NAMES if not hasattr(DeepSpeedEngine, name)] == []


def test_the_tables_hold_names_of_deepspeed_once() -> None:
    """Getters and refusals are disjoint, and no class body hides one of them."""
    assert set(GETTERS) | set(REFUSED) <= set(NAMES)
    assert not set(GETTERS) & set(REFUSED)
    for name in (*GETTERS, *REFUSED):
        assert getattr(DeepSpeedEngine, name).__qualname__.startswith("_"), name  # made by the tables' functions


def test_a_refused_name_says_the_alternative(opens: Callable[..., Any]) -> None:
    """Each refused method raises UsageError with its name and the table's sentence, whatever its arguments."""
    engine = opens()
    for name, instead in REFUSED.items():
        with pytest.raises(
            UsageError, match=re.escape(f"engine.{name}() of DeepSpeed has no counterpart here")
        ) as said:
            getattr(engine, name)(1, option=2)
        assert instead in str(said.value)


def test_a_getter_returns_the_configs_value_or_deepspeeds_default(opens: Callable[..., Any]) -> None:
    """Getters read nested keys of the dict that the user passed."""
    engine = opens(optimizer={"type": "Adam", "params": {"lr": 0.5, "betas": [0.5, 0.75]}}, steps_per_print=7)
    assert engine.optimizer_params() == {"lr": 0.5, "betas": [0.5, 0.75]}
    assert engine.steps_per_print() == 7
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert engine.zero_contiguous_gradients() is True
    assert engine.loss_scale() == 0
    assert engine.scheduler_name() is None


def test_the_page_lists_every_refused_name() -> None:
    """docs/deepspeed.md names each refused method."""
    text = PAGE.read_text()
    assert [name for name in REFUSED if f"`{name}`" not in text] == []

"""client_state under `torch.serialization.add_safe_globals`: registered globals of any kind load as in torch.load."""

from __future__ import annotations

import argparse
import fractions
import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded


class Called:
    """An object that pickles as a call of a registered function."""

    def __reduce__(self) -> Any:
        return operator.neg, (3,)


class Renamed:
    """An object that pickles as a class which is registered under this name."""


REGISTERED: dict[str, Any] = {
    "a dtype with a name": (torch.uint1, "torch.uint1"),
    "a dtype without a name, which torch cannot find": torch.uint1,
    "an object without a name": (torch.strided, "a.layout"),
    "a function": operator.neg,
    "a builtin": (len, "builtins.len"),
    "a name without a module": (dict, "dict"),
    "a bound method": "".join,
    "a class": fractions.Fraction,
}


def engine_of() -> TrainingEngine:
    return open_engine(seeded(Stack, 0), engine_config())


def safe(*registered: Any) -> Any:
    return torch.serialization.safe_globals(list(registered))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("registered", REGISTERED.values(), ids=REGISTERED)
def test_checkpoints_are_saved_and_loaded_whatever_is_registered(tmp_path: Path, registered: Any) -> None:
    state = {"epoch": 3, "dtype": torch.bfloat16, "weights": torch.arange(3)}
    with safe(registered), engine_of() as engine:
        engine.save_checkpoint(tmp_path, client_state=state)
        _, loaded = engine.load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded["weights"].tolist() == [0, 1, 2]
    assert (loaded["epoch"], loaded["dtype"]) == (3, torch.bfloat16)


@pytest.mark.parametrize(
    ("registered", "value"),
    [
        ((operator.neg,), Called()),
        (((operator.neg, "_operator.neg"),), Called()),
        ((argparse.Namespace, (torch.uint1, "torch.uint1")), argparse.Namespace(a=1)),
        (((argparse.Namespace, f"{__name__}.Renamed"),), Renamed()),
    ],
    ids=["function", "named function", "class", "renamed class"],
)
def test_registered_globals_load_as_in_torch(tmp_path: Path, registered: tuple[Any, ...], value: Any) -> None:
    with safe(*registered), engine_of() as engine:
        engine.save_checkpoint(tmp_path, client_state={"value": value})
        _, loaded = engine.load_checkpoint(tmp_path)
        torch.save(value, tmp_path / "plain")
        expected = torch.load(tmp_path / "plain", weights_only=True)
    assert loaded is not None
    assert loaded["value"] == expected
    assert type(loaded["value"]) is type(expected)


def test_a_global_under_another_name_is_refused(tmp_path: Path) -> None:
    """A class registered as (class, name) is found by that name alone, as in torch.load."""
    refused = pytest.raises(CheckpointError, match=r"Unsupported global: GLOBAL argparse\.Namespace")
    with safe((argparse.Namespace, "former.Name")), engine_of() as engine, refused:
        engine.save_checkpoint(tmp_path, client_state={"value": argparse.Namespace(a=1)})

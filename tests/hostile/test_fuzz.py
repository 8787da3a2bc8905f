"""Altered inputs are read as the original ones, or end in the project's own errors."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hostile.attacks import STEP, seal
from hostile.readers import READERS, Small, make_valid
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, InfinityError
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import seeded

FEW = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
MANY = 3000
"""Cases of each campaign; its seed is printed, and read from HOSTILE_SEED."""
VALUES = [None, -1, 0, 1, 1 << 63, 1 << 70, 1e308, float("nan"), "", "../x", "\ud800", "\0", [], {}, [[]], True]
TEXT_READERS = ("config", "bandwidths", "trace")


@pytest.fixture(scope="module")
def valid() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        make_valid(Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def engine() -> Iterator[TrainingEngine]:
    with open_engine(seeded(Small, 5), engine_config(unit_size=256)) as engine:
        yield engine


def altered(content: bytes, choose: random.Random) -> bytes:
    """Return `content` with a bit flipped, a range replaced, removed or repeated, or the end cut off."""
    at = choose.randrange(len(content) + 1)
    end = min(len(content), at + choose.choice([1, 1, 2, 8, 100]))
    kind = choose.randrange(5)
    if kind == 0 and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << choose.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + choose.randbytes(end - at) + content[end:]
    if kind == 2:
        return content[:at] + content[end:]
    return content[:at] if kind == 3 else content[:end] + content[at:]


def mutated(content: Any, choose: random.Random) -> Any:
    """Return JSON `content` with a value anywhere in it replaced or removed."""
    content = copy.deepcopy(content)
    place = content
    while True:
        key = choose.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or choose.random() < 0.15:
            break
        place = inner
    if choose.random() < 0.2:
        del place[key]
    else:
        place[key] = choose.choice(VALUES)
    return content


def check_altered_checkpoint(valid: Path, engine: TrainingEngine, choose: random.Random) -> None:
    engine.load_checkpoint(valid / "checkpoint")
    expected = {name: value.clone() for name, value in parameters_of(engine).items()}
    with tempfile.TemporaryDirectory() as copied:
        folder = Path(copied) / "checkpoint"
        shutil.copytree(valid / "checkpoint", folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = choose.choice(files)
        path.write_bytes(altered(path.read_bytes(), choose))
        try:
            _, client_state = engine.load_checkpoint(folder)
        except InfinityError:
            return
        assert client_state["epoch"] == 3 and torch.equal(client_state["order"], torch.arange(5)), path
        assert engine.global_steps == 1
        found = parameters_of(engine)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), path


def check_mutated_index(valid: Path, engine: TrainingEngine, choose: random.Random) -> None:
    """The checksum of the index is right again, so that only its values are judged."""
    with tempfile.TemporaryDirectory() as copied:
        folder = Path(copied) / "checkpoint"
        shutil.copytree(valid / "checkpoint", folder)
        path = folder / STEP / "checkpoint.json"
        content = mutated(json.loads(path.read_text()), choose)
        path.write_text(seal(content))
        try:
            engine.load_checkpoint(folder)
        except CheckpointError:
            return
        assert isinstance(engine.global_steps, int) and isinstance(engine.skipped_steps, int)


def check_altered_text(valid: Path, reader: str, choose: random.Random) -> None:
    content = (valid / reader).read_bytes()
    if choose.random() < 0.5:
        content = altered(content, choose)
    else:
        content = json.dumps(mutated(json.loads(content), choose)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / reader
        path.write_bytes(content)
        try:
            READERS[reader](path)
        except InfinityError as error:
            assert str(error), content


@FEW
@given(st.randoms(use_true_random=False))
def test_an_altered_checkpoint_is_the_original_or_an_error(
    valid: Path, engine: TrainingEngine, choose: random.Random
) -> None:
    check_altered_checkpoint(valid, engine, choose)


@FEW
@given(st.randoms(use_true_random=False))
def test_a_mutated_index_is_one_kind_of_error(valid: Path, engine: TrainingEngine, choose: random.Random) -> None:
    check_mutated_index(valid, engine, choose)


@pytest.mark.parametrize("reader", TEXT_READERS)
@FEW
@given(choose=st.randoms(use_true_random=False))
def test_altered_texts_are_read_or_refused(valid: Path, reader: str, choose: random.Random) -> None:
    check_altered_text(valid, reader, choose)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("what", ["altered checkpoint", "mutated index", *TEXT_READERS])
@pytest.mark.timeout(3600)
def test_many_altered_inputs(valid: Path, engine: TrainingEngine, what: str) -> None:
    seed = int(os.environ.get("HOSTILE_SEED") or random.randrange(1 << 32))
    print(f"HOSTILE_SEED={seed}")
    for number in range(MANY):
        choose = random.Random(f"{seed} {what} {number}")
        if what == "altered checkpoint":
            check_altered_checkpoint(valid, engine, choose)
        elif what == "mutated index":
            check_mutated_index(valid, engine, choose)
        else:
            check_altered_text(valid, what, choose)

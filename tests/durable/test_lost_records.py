"""A run whose records are lost is refused and stays as it is: it is neither begun anew nor overwritten."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from infinity.durable.condition import condition, owned
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, StorageError
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(5)
RECORDS = ("rank-00000.record-0", "rank-00000.record-1")

LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(missing_ok=True),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


def model() -> nn.Module:
    return seeded(Linears)


def opened(folder: Path) -> TrainingEngine:
    return open_engine(model(), engine_config(folder=folder, durable=True, unit_size=2000))


def content(run: Path) -> dict[str, bytes]:
    paths = (path for path in run.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def is_intact(run: Path) -> bool:
    with owned(run) as held:
        return condition(held, run, verify=True).is_intact


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a run, and its number of steps."""
    folder, steps = tmp_path_factory.mktemp("nvme"), request.param
    with opened(folder) as engine:
        train(engine, BATCHES[:steps])
    return folder, steps


@pytest.mark.parametrize("lost", [each for n in (1, 2) for each in itertools.combinations(RECORDS, n)], ids="-".join)
@pytest.mark.parametrize("how", LOSSES)
def test_any_lost_records(trained: tuple[Path, int], how: str, lost: tuple[str, ...], tmp_path: Path) -> None:
    """Without the last record the run is refused; without the one before, it resumes."""
    whole, steps = trained
    folder = Path(shutil.copytree(whole, tmp_path / "nvme"))
    run = folder / "run"
    for name in lost:
        LOSSES[how](run / "0001" / name)
    if RECORDS[steps % 2] not in lost:
        assert is_intact(run)
        with opened(folder) as engine:
            engine.resume()
            assert engine.global_steps == steps
        return
    before = content(run)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"records of rank 0 are damaged or missing.* To begin anew, remove"):
            opened(folder)
    assert content(run) == before and not is_intact(run)
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    with opened(folder) as engine:
        engine.resume()
        assert engine.global_steps == steps


def test_a_lost_file_is_named_with_its_folder(trained: tuple[Path, int], tmp_path: Path) -> None:
    """A check of a copy names the copy's file; a start says that the file is missing."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    run = folder / "run"
    states = run / "0001" / "rank-00000.states"
    states.unlink()
    with owned(run) as held:
        assert condition(held, run, verify=True).faults == (f"rank 0: {states}: No such file or directory",)
    with pytest.raises(StorageError, match=rf"{states} is missing\. If it was lost, restore it from a copy"):
        opened(folder)

"""A run whose records are lost is refused and stays as it is: it is neither begun anew nor overwritten."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from infinity.durable.condition import condition, owned
from infinity.durable.manifest import read_manifest
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, StorageError
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Linears, seeded, vector_batches
from support.records import of_version

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


@pytest.mark.parametrize("generation", ["0001", "0002"], ids=["first", "later"])
@pytest.mark.parametrize("how", [how for how in LOSSES if how != "zeroed"])
def test_a_lost_manifest(trained: tuple[Path, int], how: str, generation: str, tmp_path: Path) -> None:
    """The run is refused in every generation, and resumes once the manifest is restored."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    run = folder / "run"
    (run / "0001").rename(run / generation)
    manifest = run / generation / "rank-00000.json"
    whole = manifest.read_bytes()
    LOSSES[how](manifest)
    before = content(run)
    with pytest.raises(StorageError, match=r"rank-00000\.json (was lost|is damaged).* restore .* from a copy"):
        opened(folder)
    with pytest.raises(CheckpointError, match=r"manifest.* from a copy"):
        is_intact(run)
    assert content(run) == before
    manifest.write_bytes(whole)
    manifest.chmod(0o600)
    assert is_intact(run)
    with opened(folder) as engine:
        engine.resume()
        assert engine.global_steps == trained[1]


def test_a_generation_without_records_is_not_replaced_by_the_one_before(
    trained: tuple[Path, int], tmp_path: Path
) -> None:
    """A check and a start agree."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    run = folder / "run"
    shutil.copytree(run / "0001", run / "0002")
    for path in (run / "0002").glob("*.record-*"):
        path.unlink()
    before = content(run)
    with pytest.raises(CheckpointError, match="records of rank 0 are damaged or missing"):
        opened(folder)
    with owned(run) as held:
        assert condition(held, run, verify=True).faults == ("rank 0: its records are damaged or missing",)
    assert content(run) == before


def test_a_generation_without_a_manifest_is_not_replaced_by_the_one_before(
    trained: tuple[Path, int], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    run = folder / "run"
    shutil.copytree(run / "0001", run / "0002")
    (run / "0002" / "rank-00000.json").unlink()
    before = content(run)
    with pytest.raises(StorageError, match=f"{run / '0002'} has files of a run, but no manifest"):
        opened(folder)
    with pytest.raises(CheckpointError, match=f"all manifests in {run / '0002'} are missing or damaged"):
        is_intact(run)
    assert content(run) == before


def test_a_record_that_the_first_commit_begins_proves_it(trained: tuple[Path, int], tmp_path: Path) -> None:
    """The manifest may be of a moment before the first commit, as in a kill right after it."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    part = folder / "run" / "0001"
    manifest = read_manifest(part / "rank-00000.json")
    assert manifest is not None and manifest.has_commit
    (part / "rank-00000.json").write_text(replace(manifest, has_commit=False).to_json())
    (part / RECORDS[1]).unlink()
    (part / RECORDS[0]).write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match="records of rank 0 are damaged or missing"):
        opened(folder)


def test_a_check_of_a_copy_names_no_other_folder(trained: tuple[Path, int], tmp_path: Path) -> None:
    """Errors of a check have the path that was passed, not that of a descriptor or of the original."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "nvme"))
    run = folder / "run"
    manifest = read_manifest(run / "0001" / "rank-00000.json")
    assert manifest is not None
    other = replace(manifest, layout={**manifest.layout, "rule": "another"})
    (run / "0001" / "rank-00000.json").write_text(other.to_json())
    with owned(run) as held:
        (fault,) = condition(held, run, verify=True).faults
    assert fault.startswith(f"rank 0: {run / '0001'} has files of different runs")
    for record in RECORDS:
        (run / "0001" / record).write_bytes(of_version(bytes(40), b"99"))
    with pytest.raises(CheckpointError, match=rf"^{run}/0001/rank-00000.record-0 has format version 99"):
        is_intact(run)

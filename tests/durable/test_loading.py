"""`load_checkpoint` of a run's folder: in its own engine, in engines of other runs, and with its other arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity.nn
from durable.conversion_cases import BATCH, WIDTH, Mixed, assert_same, config, everything, opened, train
from infinity.checkpoint.rank_states import Shards
from infinity.durable.folder import manifest_file, read_generations, record_file
from infinity.durable.manifest import read_manifest
from infinity.durable.record import read_record
from infinity.engine.inference import InferenceEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, StorageError, UsageError
from infinity.plan.io import IoPlan
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.models import seeded

STEPS = 3
OTHER = {"unit_size": 1 << 20}
"""Another layout than that of `run`."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of `STEPS` steps, beside a checkpoint of the same step in `saved`."""
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
        engine.save_checkpoint(tmp_path / "saved")
    return tmp_path / "run"


def commits(run: Path) -> dict[int, int]:
    """Return generation → number of its last commit."""
    return {each.number: max(each.commits[0], default=0) for each in read_generations(run)}


def loaded(engine: TrainingEngine, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return all states after a load, and the progress."""
    engine.load_checkpoint(folder, **arguments)
    rates = {"lr": engine.optimizer.param_groups[0]["lr"], "global_steps": engine.global_steps}
    return everything(engine) | rates


def expected(run: Path, **arguments: Any) -> dict[str, Any]:
    """Return what the checkpoint of the same step gives an engine that is not durable."""
    with opened(str(run.parent), 1, seed=9, durable=False, lr=0.5) as engine:
        return loaded(engine, run.parent / "saved", **arguments)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "all": {},
    "the module only": {"load_module_only": True},
    "no optimizer states": {"load_optimizer_states": False},
    "no random numbers": {"load_rng": False},
}


@pytest.mark.parametrize("layout", [{}, OTHER], ids=["same layout", "other layout"])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_mean_what_they_mean_for_a_checkpoint(
    arguments: dict[str, Any], layout: dict[str, Any], run: Path
) -> None:
    want = expected(run, **arguments)
    with opened(str(run.parent), 1, seed=9, lr=0.5, **layout) as engine:
        assert_same(loaded(engine, run, **arguments), want)
    with opened(str(run.parent), 1, seed=5, lr=0.5, **layout) as engine:
        assert_same(loaded(engine, run), want)
        train(engine, range(STEPS, STEPS + 1))


def test_a_run_is_loaded_by_an_engine_that_is_not_durable(run: Path) -> None:
    before = commits(run)
    with opened(str(run.parent), 1, seed=9, durable=False, lr=0.5) as engine:
        path, client_state = engine.load_checkpoint(run)
        assert (path, client_state) == (run, {"next": STEPS})
        assert_same(loaded(engine, run), expected(run))
        train(engine, range(STEPS, STEPS + 2))
    assert commits(run) == before == {1: STEPS}


def test_a_run_that_loads_another_one_commits_it_as_its_first_step(run: Path) -> None:
    with opened(str(run.parent), 1, seed=9, lr=0.5, run="second") as engine:
        assert_same(loaded(engine, run), expected(run))
        assert commits(run.parent / "second") == {1: 1}
        kept = everything(engine)
    assert commits(run) == {1: STEPS}
    with opened(str(run.parent), 1, seed=5, lr=0.5, run="second") as engine:
        assert engine.resume() == {"next": STEPS}
        assert_same(everything(engine), kept)


@pytest.mark.parametrize("source", ["run", "saved"])
def test_a_load_replaces_no_run_that_was_not_loaded(source: str, run: Path) -> None:
    """Its states stay committed, and the next step is refused."""
    with opened(str(run.parent), 1, seed=3, run="second") as engine:
        train(engine, range(1))
        kept = everything(engine)
    engine = opened(str(run.parent), 1, seed=9, run="second")
    engine.load_checkpoint(run.parent / source)
    assert commits(run.parent / "second") == {1: 1}
    with pytest.raises(UsageError, match=r"holds a run that this one would replace"):
        train(engine, range(1))
    engine.close()
    with opened(str(run.parent), 1, seed=9, run="second") as engine:
        engine.resume()
        assert_same(everything(engine), kept)


def test_a_checkpoint_that_a_new_run_loads_is_committed(run: Path) -> None:
    with opened(str(run.parent), 1, seed=9, run="second") as engine:
        engine.load_checkpoint(run.parent / "saved")
        kept = everything(engine)
    with opened(str(run.parent), 1, seed=8, run="second") as engine:
        engine.resume()
        assert engine.global_steps == STEPS
        assert_same(everything(engine), kept)


def test_a_run_is_loaded_for_inference(run: Path) -> None:
    with opened(str(run.parent), 1, durable=False) as engine:
        engine.load_checkpoint(run)
        values = engine.state_dict()
    chosen = config(str(run.parent), 1, durable=False)
    model = seeded(Mixed, 9).bfloat16()
    with InferenceEngine(model, chosen, device=CpuDevice()) as engine:
        assert engine.load_checkpoint(run) == (run, {"next": STEPS})
        assert_same(engine.state_dict(), values)
    assert commits(run) == {1: STEPS}


@pytest.mark.parametrize("kept", [{}, {"aio": {"checksum": True}}], ids=["default", "aio.checksum"])
def test_a_changed_byte_is_found_before_a_run_is_converted(kept: dict[str, Any], tmp_path: Path) -> None:
    """A changed byte in any extent is found; verify=False loads it."""
    with opened(str(tmp_path), 1, **kept) as engine:
        train(engine, range(2))
    folder = tmp_path / "run" / "0001"
    manifest, record = read_manifest(manifest_file(folder, 0)), read_record(record_file(folder, 0, 2))
    assert manifest is not None and record is not None
    for (_, _, *places, nbytes), slot in zip(manifest.layout["extents"], record.slots, strict=True):
        for place in (places[slot], places[slot] + nbytes - 1):
            flip(folder / "rank-00000.states", place)
            with (
                opened(str(tmp_path), 1, seed=9, **kept, **OTHER) as engine,
                pytest.raises(CheckpointError, match=r"rank-00000\.states does not hold the states of its commit"),
            ):
                engine.resume()
            flip(folder / "rank-00000.states", place)
    with opened(str(tmp_path), 1, seed=9, **kept, **OTHER) as engine:
        flip(folder / "rank-00000.states", places[slot])
        engine.load_checkpoint(tmp_path / "run", verify=False)
        assert engine.global_steps == 2


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_run_that_is_being_trained_is_not_read(run: Path) -> None:
    with opened(str(run.parent), 1), opened(str(run.parent), 1, durable=False) as other:
        with pytest.raises(StorageError, match=r"run is in use by another process"):
            other.load_checkpoint(run)
        train(other, range(1))


def test_a_run_without_a_commit_is_refused(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        with pytest.raises(CheckpointError, match=r"run has no committed step: start the run without loading it"):
            engine.load_checkpoint(tmp_path / "run")
        train(engine, range(1))


def test_a_run_of_another_model_is_refused(run: Path) -> None:
    class Larger(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Parameter(torch.ones(3))

    chosen = config(str(run.parent), 1)
    with TrainingEngine(seeded(Larger).bfloat16(), chosen, device=CpuDevice()) as engine:
        with pytest.raises(CheckpointError, match=r"is a checkpoint of another model: more is in the model only"):
            engine.resume()
        engine.load_checkpoint(run, load_module_strict=False)
        assert engine.global_steps == STEPS
        assert torch.equal(engine.state_dict()["more"], torch.ones(3).bfloat16())


def tiled(folder: Path, rows: int) -> TrainingEngine:
    """Return an engine whose layers have tiles of `rows` rows of the first."""
    model = seeded(Mixed).bfloat16()
    infinity.nn.tile(model, max_bytes=rows * 2 * WIDTH)
    return TrainingEngine(model, config(str(folder), 1), device=CpuDevice())


def test_a_layer_in_other_tiles_is_refused_by_name(tmp_path: Path) -> None:
    """A commit holds each tile as a parameter."""
    with tiled(tmp_path, 40) as engine:
        train(engine, range(2))
        kept = everything(engine)
    with (
        tiled(tmp_path, 64) as engine,
        pytest.raises(CheckpointError, match=r"first\.\S+ has shape .* in the checkpoint|first\.\S+ is in the"),
    ):
        engine.resume()
    with tiled(tmp_path, 40) as engine:
        engine.resume()
        assert_same(everything(engine), kept)


@pytest.mark.filterwarnings("ignore:.*are on one file system:RuntimeWarning")
def test_a_run_that_gets_more_folders_is_refused_by_name(tmp_path: Path) -> None:
    """Its own may be the first of them, or not."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with striped(one) as engine:
        train(engine, range(2))
        kept = everything(engine)
    with (
        striped(one, two) as engine,
        pytest.raises(CheckpointError, match=r"one/run is striped over 1 folders, and 2 are named"),
    ):
        engine.resume()
    with pytest.raises(StorageError, match=r"one/run is the first folder of a run"):
        striped(two, one)
    with striped(one) as engine:
        engine.resume()
        assert_same(everything(engine), kept)


@pytest.mark.filterwarnings("ignore:.*are on one file system:RuntimeWarning")
def test_a_striped_run_is_converted(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with striped(*folders) as engine:
        train(engine, range(3))
        kept = everything(engine)
    with striped(*folders, **OTHER) as engine:
        engine.resume()
        assert_same(everything(engine), kept)
        assert [sorted(each.name for each in (folder / "run").glob("0*")) for folder in folders] == [["0002"]] * 2


@pytest.mark.filterwarnings("ignore:.*are on one file system:RuntimeWarning")
def test_shares_of_folders_stay_as_they_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured shares are recorded and used again; stated ones convert the run."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()

    def measured(weights: tuple[int, int]) -> None:
        def by_speed(io: IoPlan, ranks: int, *, writes: bool = True) -> IoPlan:
            return replace(io, stripe=replace(io.stripe, weights=weights))

        monkeypatch.setattr("infinity.engine.platform.striped_by_speed", by_speed)

    kept: dict[str, Any] = {}
    small: dict[str, Any] = {"block_size": 1 << 16}
    for weights, shares, generation in (
        ((3, 1), "auto", "0001"),
        ((1, 2), "auto", "0001"),
        ((1, 2), [2, 5], "0002"),
        ((3, 1), "auto", "0002"),
        ((3, 1), "equal", "0003"),
        ((3, 1), "auto", "0003"),
    ):
        measured(weights)
        with striped(*folders, aio={**small, "shares": shares}) as engine:
            if kept:
                engine.resume()
                assert_same(everything(engine), kept)
            train(engine, range(3))
            kept = everything(engine)
            assert ("shares of nvme" in engine.describe()) == (generation != "0003")
        assert [sorted(each.name for each in (folder / "run").glob("0*")) for folder in folders] == [[generation]] * 2
        content = json.loads(manifest_file(folders[0] / "run" / generation, 0).read_text())
        found = content["version"], content["layout"].get("weights")
        assert found == {"0001": (2, [3, 1]), "0002": (2, [2, 5]), "0003": (1, None)}[generation]


def striped(*folders: Path, **options: Any) -> TrainingEngine:
    chosen = engine_config(folder=folders, bf16=True, micro=BATCH, durable=True, **{"unit_size": 2048, **options})
    return TrainingEngine(seeded(Mixed).bfloat16(), chosen, device=CpuDevice())


@pytest.mark.parametrize("own", [True, False], ids=["its own engine", "another engine"])
def test_a_tag_in_the_folder_of_a_run_is_refused(own: bool, run: Path) -> None:
    """The last commit is not the checkpoint that the tag asks for."""
    with opened(str(run.parent), 1, seed=9, durable=own) as engine:
        with pytest.raises(CheckpointError, match="last commit and no checkpoint 'global_step1': leave out the tag"):
            engine.load_checkpoint(run, tag="global_step1")
        assert engine.global_steps == 0
        engine.load_checkpoint(run)
        assert engine.global_steps == STEPS


@pytest.mark.parametrize("layout", [{}, OTHER], ids=["same layout", "other layout"])
def test_a_buffer_of_another_kind_is_refused(layout: dict[str, Any], run: Path) -> None:
    """A copy to whole numbers would cut the fraction off."""
    model = seeded(Mixed, 9).bfloat16()
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    refused = pytest.raises(
        CheckpointError, match=r"its buffer seen is torch\.bfloat16, and the model's is torch\.int64"
    )
    with TrainingEngine(model, config(str(run.parent), 1, **layout), device=CpuDevice()) as engine, refused:
        engine.resume()


def test_a_damaged_manifest_is_named(run: Path) -> None:
    (run / "0001" / "rank-00000.json").write_text("{}")
    for _ in range(2):  # the first attempt changes nothing
        with pytest.raises(StorageError, match=r"0001/rank-00000\.json is damaged"):
            opened(str(run.parent), 1)


@pytest.mark.parametrize("source", ["run", "saved"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CheckpointError("it was cut short")], ids=str)
def test_a_load_that_fails_midway_leaves_no_mixed_states(
    error: Exception, source: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops, and commits none of them."""
    read, calls = Shards.read, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 8:
            raise error
        return read(*arguments)

    (tmp_path / "other").mkdir()
    with opened(str(tmp_path / "other"), 1, seed=7) as engine:
        train(engine, range(2))
        before = everything(engine)
        monkeypatch.setattr(Shards, "read", failing)
        with pytest.raises(type(error)):
            engine.load_checkpoint(tmp_path / source, verify=False)
        monkeypatch.undo()
        with pytest.raises(UsageError, match=r"the engine stopped \(a load of .* failed when some states had been"):
            train(engine, range(2, 3))
    with opened(str(tmp_path / "other"), 1, seed=9) as engine:
        engine.resume()
        assert_same(everything(engine), before)


def test_parameters_of_a_load_that_fails_midway_are_not_used(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise CheckpointError("it was cut short")

    monkeypatch.setattr(Shards, "read", failing)
    model = seeded(Mixed, 9).bfloat16()
    with InferenceEngine(model, config(str(run.parent), 1, durable=False), device=CpuDevice()) as engine:
        with pytest.raises(CheckpointError, match="cut short"):
            engine.load_checkpoint(run.parent / "saved")
        with pytest.raises(UsageError, match="the engine stopped"):
            engine(torch.ones(2, WIDTH, dtype=torch.bfloat16))

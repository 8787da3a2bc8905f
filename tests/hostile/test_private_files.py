"""Files that the package writes: who may read them, and links that are put in their way."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hostile.readers import Small
from infinity.checkpoint.export import export
from infinity.cli.console import write_output
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, UsageError
from infinity.inputs import replacing
from infinity.tiers import files
from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded

SECRET = 0.123456789
"""A value of the model and of batches, which no log may show."""


@pytest.fixture
def engine() -> Iterator[TrainingEngine]:
    with open_engine(seeded(Small), engine_config(unit_size=256)) as engine:
        yield engine


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    former = os.umask(0o022)
    yield os.umask
    os.umask(former)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o750), (0o077, 0o700), (0o000, 0o770), (0o002, 0o770)])
def test_a_checkpoint_is_not_readable_by_others(
    tmp_path: Path, engine: TrainingEngine, umask: Callable[[int], int], mask: int, expected: int
) -> None:
    umask(mask)
    path = engine.save_checkpoint(tmp_path, "a")
    assert mode(path) == expected
    assert all(not file.is_symlink() for file in path.iterdir())


@pytest.mark.parametrize("anonymous", [True, False], ids=["O_TMPFILE", "named"])
def test_a_swap_file_is_private_and_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: Callable[[int], int], anonymous: bool
) -> None:
    umask(0)
    made = []
    if not anonymous:
        real_open, real_mkdtemp = os.open, files.tempfile.mkdtemp

        def refusing(path: object, flags: int, *rest: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return real_open(path, flags, *rest)  # type: ignore[call-overload,no-any-return]

        def noted(**options: object) -> str:
            made.append(mode(Path(folder := real_mkdtemp(**options))))  # type: ignore[call-overload]
            return str(folder)

        monkeypatch.setattr(files.os, "open", refusing)
        monkeypatch.setattr(files.tempfile, "mkdtemp", noted)
    fd, left = files.open_anonymous(tmp_path, "states")
    status = os.fstat(fd)
    os.close(fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0 and left is None
    assert made == ([] if anonymous else [0o700]) and list(tmp_path.iterdir()) == []


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, to which links lead."""
    path = tmp_path / "victim"
    path.write_text("unharmed")
    return path


def test_a_link_in_place_of_latest_is_replaced(tmp_path: Path, engine: TrainingEngine, victim: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "latest").symlink_to(victim)
    (folder / f".latest-{os.getpid()}").symlink_to(victim)
    engine.save_checkpoint(folder, "a")
    assert victim.read_text() == "unharmed" and (folder / "latest").read_text() == "a"
    assert not (folder / "latest").is_symlink()


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_a_link_in_place_of_a_checkpoint_is_replaced(tmp_path: Path, engine: TrainingEngine, target: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    if target == "folder":
        elsewhere.mkdir()
        (elsewhere / "file").write_text("unharmed")
    (folder / "a").symlink_to(elsewhere)
    path = engine.save_checkpoint(folder, "a")
    assert not path.is_symlink() and sorted(each.name for each in folder.iterdir()) == ["a", "latest"]
    assert target == "nothing" or [each.name for each in elsewhere.iterdir()] == ["file"]


def test_a_link_in_place_of_a_partial_folder_is_refused(tmp_path: Path, engine: TrainingEngine) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / f".a.partial-{os.getpid()}").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="could not be written"):
        engine.save_checkpoint(folder, "a")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["weights.bin", "weights.safetensors"])
def test_links_in_place_of_weights_are_replaced(
    tmp_path: Path, engine: TrainingEngine, victim: Path, name: str
) -> None:
    (tmp_path / name).symlink_to(victim)
    (tmp_path / f".{name}.partial-{os.getpid()}").symlink_to(victim)
    engine.save_16bit_model(tmp_path, name)
    assert victim.read_text() == "unharmed" and not (tmp_path / name).is_symlink()


def test_a_link_in_place_of_a_partial_trace_is_not_followed(
    tmp_path: Path, engine: TrainingEngine, victim: Path
) -> None:
    (tmp_path / f".trace.json.partial-{os.getpid()}").symlink_to(victim)
    engine.profile(1, tmp_path / "trace.json")
    engine.backward(engine(torch.ones(4, 8)))
    engine.step()
    assert write_output("--out", tmp_path / "trace.json", "{}") == ""
    assert victim.read_text() == "unharmed" and (tmp_path / "trace.json").is_file()


def test_names_of_new_files_cannot_be_predicted(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        assert first != second and str(os.getpid()) not in first.name.split("-")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ValueError), replacing(tmp_path / "b"):
        raise ValueError
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_an_export_copies_no_file_from_elsewhere(tmp_path: Path, engine: TrainingEngine, victim: Path) -> None:
    engine.save_checkpoint(tmp_path / "run", "a")
    config = tmp_path / "config"
    config.mkdir()
    (config / "tokenizer.json").symlink_to(victim)
    with pytest.raises(UsageError, match="outside of the folder"):
        export(tmp_path / "run", tmp_path / "out", config_from=config)
    assert not (tmp_path / "out").exists()


def test_an_export_copies_links_of_the_hubs_cache(tmp_path: Path, engine: TrainingEngine) -> None:
    engine.save_checkpoint(tmp_path / "run", "a")
    blobs, config = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    config.mkdir(parents=True)
    (blobs / "0").write_text("{}")
    (config / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "0"))
    export(tmp_path / "run", tmp_path / "out", config_from=config)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_and_errors_hold_no_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither parameters nor batches nor client_state are shown, also not by errors and `describe`."""
    caplog.set_level(logging.DEBUG)
    model = seeded(Small)
    torch.nn.init.constant_(model.layers[0].weight, SECRET)
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_engine(model, engine_config(unit_size=256)) as engine:
            engine.backward(engine(torch.full((4, 8), SECRET)))
            engine.step()
            engine.save_checkpoint(tmp_path, "a", {"token": str(SECRET)})
            engine.load_checkpoint(tmp_path)
            for value in ({"x": object(), "token": str(SECRET)}, [str(SECRET)]):
                with pytest.raises(CheckpointError) as refused:
                    engine.save_checkpoint(tmp_path, "b", value)  # type: ignore[arg-type]
                texts.append(str(refused.value))
            (tmp_path / "a" / "client_state.pt").write_text(str(SECRET))
            with pytest.raises(CheckpointError) as refused:
                engine.load_checkpoint(tmp_path)
            texts += [str(refused.value), repr(engine), str(engine.describe())]
    out = capfd.readouterr()
    shown = "\n".join([caplog.text, out.out, out.err, *texts, *(str(each.message) for each in caught)])
    assert "0.1234" not in shown and "0.123" not in shown

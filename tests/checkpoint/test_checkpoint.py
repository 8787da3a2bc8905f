"""Checkpoints: exact resumption for any tiers, units and tiles; damaged files and other models are rejected."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from infinity.checkpoint.export import export
from infinity.checkpoint.format import persistent_buffers, read_index
from infinity.checkpoint.piecewise import PiecewiseFile
from infinity.checkpoint.tensors import FileRecord
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, UsageError
from infinity.optim.moments import moment_to_fp32
from infinity.rules import RULES
from infinity.tiers.device import Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(10)


class Normed(nn.Module):
    """A model with buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def engine_of(
    make: Callable[[], nn.Module] = Stack, seed: int = 0, device: Device | None = None, **options: Any
) -> TrainingEngine:
    return open_engine(seeded(make, seed), engine_config(**options), device)


def saved(folder: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train 5 steps, save, train 5 more. Return the later losses and the final parameters."""
    with engine_of(**options) as engine:
        train(engine, BATCHES[:5])
        engine.save_checkpoint(folder, client_state={"epoch": 3})
        return train(engine, BATCHES[5:]), parameters_of(engine)


@pytest.mark.parametrize(
    "other",
    [
        {"param": "cpu", "optim": "none", "unit_size": 30_000},
        {"param": "none", "optim": "cpu", "tile_size": 8192},
        {"update": "after_backward", "master": "fp32"},
        {"memory": {"host": 1_400_000}},
    ],
    ids=["tiers and units", "tiers and tiles", "schedule and master", "a budget"],
)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_training_goes_on_bit_for_bit_wherever_it_is_loaded(tmp_path: Path, bf16: bool, other: dict[str, Any]) -> None:
    losses, parameters = saved(tmp_path, bf16=bf16)
    with engine_of(seed=7, bf16=bf16, **other) as engine:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert (path.name, client_state, engine.global_steps) == ("global_step5", {"epoch": 3}, 5)
        assert train(engine, BATCHES[5:]) == losses
        for name, value in parameters_of(engine).items():
            assert torch.equal(value, parameters[name]), name


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_training_goes_on_bit_for_bit_with_another_budget_of_the_device(tmp_path: Path, bf16: bool) -> None:
    options: dict[str, Any] = {"param": "cpu", "optim": "cpu", "bf16": bf16, "clip": 0.3, "unit_size": 4096}
    shares = ({"device_optimizer": 0.3}, {"device": 1_000_000}, {"device": 1 << 30}, {})
    losses, parameters = saved(tmp_path, device=LateDevice(delay=0.002), memory=shares[0], **options)
    mixtures = set()
    for memory in shares:
        with engine_of(seed=7, device=LateDevice(delay=0.002), memory=memory, **options) as engine:
            mixtures.add(engine.parts.plan.placement.nbytes.get("device", 0))
            engine.load_checkpoint(tmp_path)
            assert train(engine, BATCHES[5:]) == losses
            for name, value in parameters_of(engine).items():
                assert torch.equal(value, parameters[name]), name
    assert len(mixtures) == len(shares)


@pytest.mark.parametrize("rule", ["AdamW", "Adagrad", "Lion", "SGD"])
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_cheap_moments_go_on_bit_for_bit(tmp_path: Path, moments: str, rule: str) -> None:
    options: dict[str, Any] = {"bf16": True, "moments": moments, "optimizer": rule}
    losses, parameters = saved(tmp_path, **options)
    with engine_of(seed=7, **options, param="cpu", unit_size=30_000, tile_size=8192, master="fp32") as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[5:]) == losses
        assert all(torch.equal(value, parameters[name]) for name, value in parameters_of(engine).items())


@pytest.mark.parametrize("into", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_moments_are_brought_into_the_format_of_the_engine(tmp_path: Path, moments: str, into: str) -> None:
    """Master and parameters are loaded exactly, moments within the resolution of their format."""
    with engine_of(moments=moments) as engine:
        train(engine, BATCHES[:5])
        engine.save_checkpoint(tmp_path)
        before = in_fp32(states_of(engine))
    with engine_of(seed=7, moments=into) as engine:
        engine.load_checkpoint(tmp_path)
        after = in_fp32(states_of(engine))
        assert after.keys() == before.keys()
        for name, value in after.items():
            if name.endswith("/master") or into in (moments, "fp32"):
                assert torch.equal(value, before[name]), name
            else:
                # A code of a root is up to 1/16 and a little from the next, and the square of that a little over twice.
                width = 2**-7 if into == "bf16" else 2**-3 + 2**-6
                near = (value - before[name]).abs() <= width * before[name].abs() + 2**-12 * before[name].abs().max()
                assert near.all(), name
        assert train(engine, BATCHES[5:])[-1] > 0


def in_fp32(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return "parameter/state" → fp32 values of masters and Adam's moments, from any format."""
    found: dict[str, torch.Tensor] = {}
    for name, value in states.items():
        parameter, _, state = name.rpartition("/")
        plain = state.removesuffix("_8bit")
        if not state.endswith("_scale"):
            scale = states.get(f"{parameter}/{plain}_scale")
            found[f"{parameter}/{plain}"] = moment_to_fp32(value, scale, root=plain in RULES["adamw"].roots)
    return found


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_versions_before_are_read(tmp_path: Path, version: int) -> None:
    losses, _ = saved(tmp_path)
    folder = tmp_path / "global_step5"
    written = json.loads((folder / "checkpoint.json").read_text())
    assert written.pop("file_crc32").keys() == written["file_bytes"].keys()
    for file in ("rng.pt", "client_state.pt"):
        del written["file_bytes"][file]
    (folder / "rng.pt").unlink()
    if version == 1:
        assert written.pop("moments") == "fp32"
    (folder / "checkpoint.json").write_text(json.dumps(written | {"version": version}))
    with engine_of(seed=7) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[5:]) == losses


def test_each_version_that_was_ever_written_is_read(tmp_path: Path) -> None:
    """The numbers stand here, so that a new version cannot replace one of them."""
    saved(tmp_path)
    folder = tmp_path / "global_step5"
    written = json.loads((folder / "checkpoint.json").read_text())
    for version in (1, 2, 3, 4, 5, 6, 7, 8):
        (folder / "checkpoint.json").write_text(json.dumps(written | {"version": version}))
        with pytest.raises(CheckpointError, match="format version 8") if version == 8 else nullcontext():
            assert read_index(folder).parameters


RESUME = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch
torch.set_num_threads(int(sys.argv[2]))  # the order of sums depends on it
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.states import states_of
with open_engine(seeded(Stack, 9), engine_config(bf16=True, clip=0.5)) as engine:
    engine.load_checkpoint(Path(sys.argv[1]))
    print(train(engine, token_batches(10)[5:]))
"""


def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    losses, _ = saved(tmp_path, bf16=True, clip=0.5)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", RESUME, str(tmp_path), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout.splitlines()[-1]) == losses


def test_buffers_are_saved(tmp_path: Path) -> None:
    batches = [(torch.randn(16, 8),) for _ in range(3)]
    with engine_of(Normed) as engine:
        train(engine, batches)
        engine.save_checkpoint(tmp_path)
        before = {name: value.clone() for name, value in persistent_buffers(engine.module).items()}
        expected = engine.eval()(*batches[0]).item()
    with engine_of(Normed, seed=5) as engine:
        engine.load_checkpoint(tmp_path)
        after = persistent_buffers(engine.module)
        assert before and all(torch.equal(after[name], value) for name, value in before.items())
        assert engine.eval()(*batches[0]).item() == expected


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_loading_forgets_the_gradients_of_the_step_in_progress(tmp_path: Path, clip: float) -> None:
    losses, parameters = saved(tmp_path, clip=clip)
    with engine_of(clip=clip) as engine:
        train(engine, BATCHES[:3])
        engine.backward(engine(*BATCHES[9]))
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[5:]) == losses
        assert all(torch.equal(value, parameters[name]) for name, value in parameters_of(engine).items())


def test_a_step_that_is_not_finished_is_not_saved(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, BATCHES[:2])
        engine.backward(engine(*BATCHES[2]))
        with pytest.raises(UsageError, match=r"after engine\.step"):
            engine.save_checkpoint(tmp_path)
        engine.step()
        engine.save_checkpoint(tmp_path)


def test_client_state_that_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, BATCHES[:1])
        with pytest.raises(CheckpointError, match="client_state"):
            engine.save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(a=1)})
        with pytest.raises(CheckpointError, match="client_state is a list: pass a dict"):
            engine.save_checkpoint(tmp_path, client_state=[3])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (argparse.Namespace(a=1), "Unsupported global: GLOBAL argparse.Namespace"),
        (numpy.float64(3), "Unsupported global: GLOBAL numpy._core.multiarray.scalar"),
        ((x for x in ()), "cannot pickle 'generator' object"),
    ],
    ids=["class", "numpy", "generator"],
)
def test_the_error_of_a_client_state_is_one_line_of_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, why: str
) -> None:
    """The error has no terminal colours, which torch's own text has."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with engine_of() as engine, pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(tmp_path, client_state={"value": value})
    text = str(caught.value)
    assert text.startswith(f"client_state cannot be saved for a safe load ({why}): ") and text.isprintable()


@pytest.mark.parametrize("file", ["client_state.pt", "rng.pt"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"whole"], ids=str)
def test_the_error_of_a_damaged_pickle_is_one_line_of_plain_text(tmp_path: Path, file: str, content: bytes) -> None:
    saved(tmp_path)
    folder = tmp_path / "global_step5"
    torch.save({"value": argparse.Namespace()}, tmp_path / "whole")
    (folder / file).write_bytes((tmp_path / "whole").read_bytes() if content == b"whole" else content)
    index = json.loads((folder / "checkpoint.json").read_text()) | {"version": 3}  # without a checksum of its own
    index["file_bytes"][file] = (folder / file).stat().st_size
    (folder / "checkpoint.json").write_text(json.dumps(index))
    with engine_of() as engine, pytest.raises(CheckpointError, match=rf"{file} cannot be read \(.") as caught:
        engine.load_checkpoint(tmp_path, verify=False)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_former_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real, calls = PiecewiseFile.finish, []

    def failing(file: PiecewiseFile) -> FileRecord:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return real(file)

    with engine_of() as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path, "a")
        monkeypatch.setattr(PiecewiseFile, "finish", failing)
        train(engine, BATCHES[1:2])
        with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
            engine.save_checkpoint(tmp_path, "a")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1


def test_a_first_save_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", _fail)
            with pytest.raises(CheckpointError, match="could not be written"):
                engine.save_checkpoint(tmp_path / "new" / "runs")
        assert not list(tmp_path.iterdir())
        (tmp_path / "new").mkdir()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", _fail)
            with pytest.raises(CheckpointError, match="could not be written"):
                engine.save_checkpoint(tmp_path / "new" / "runs")
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        assert engine.save_checkpoint(tmp_path / "new" / "runs").is_dir()


def _fail(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_save_killed_between_its_renames_is_found(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path, "a")
        os.rename(tmp_path / "a", tmp_path / ".a.replaced-999999999")
        (tmp_path / ".a.partial-999999999").mkdir()
        engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, "a")
        engine.save_checkpoint(tmp_path, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


def damage(folder: Path, what: str) -> None:
    checkpoint = folder / "global_step5"
    file = sorted(checkpoint.glob("unit-*.safetensors"))[1]
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    if what == "a file is missing":
        file.unlink()
    elif what == "a file is cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif what == "a header is altered":
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    elif what == "the index is cut":
        (checkpoint / "checkpoint.json").write_text(json.dumps(index)[:-20])
    elif what == "a newer version":
        (checkpoint / "checkpoint.json").write_text(json.dumps({**index, "version": 99}))
    elif what == "the index is altered":
        index["param_groups"][0]["lr"] *= 10
        (checkpoint / "checkpoint.json").write_text(json.dumps(index))
    elif what == "no latest":
        (folder / "latest").unlink()


@pytest.mark.parametrize(
    "what",
    [
        "a file is missing",
        "a file is cut",
        "a header is altered",
        "the index is cut",
        "the index is altered",
        "a newer version",
        "no latest",
    ],
)
def test_damage_is_an_error_before_anything_is_changed(tmp_path: Path, what: str) -> None:
    saved(tmp_path)
    damage(tmp_path, what)
    with engine_of(seed=3) as engine:
        train(engine, BATCHES[:2])
        before = parameters_of(engine)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


FILES = ["unit-00002.safetensors", "buffers.safetensors", "client_state.pt", "rng.pt"]


@pytest.mark.parametrize("file", FILES)
def test_a_byte_that_was_altered_is_an_error_before_anything_is_changed(tmp_path: Path, file: str) -> None:
    """An altered byte in a value, which sizes and headers do not show, is an error; verify=False loads it."""
    saved(tmp_path)
    path = tmp_path / "global_step5" / file
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with engine_of(seed=3) as engine:
        before = parameters_of(engine)
        with pytest.raises(CheckpointError, match=f"{file} (was altered|cannot be read)"):
            engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        if file.startswith("unit"):
            engine.load_checkpoint(tmp_path, verify=False)
            assert engine.global_steps == 5
            with pytest.raises(CheckpointError, match="was altered"):
                export(tmp_path, tmp_path / "out")
            export(tmp_path, tmp_path / "out", verify=False)


def draws() -> list[float]:
    """Return a few numbers of each generator. Python and numpy draw pairs and cache the second number."""
    return [float(torch.rand(())), random.gauss(0, 1), random.random(), float(numpy.random.randn())]


def test_random_numbers_go_on(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, BATCHES[:1])
        draws()
        engine.save_checkpoint(tmp_path)
        first = draws()
        assert draws() != first
        engine.load_checkpoint(tmp_path)
        assert draws() == first
        then = draws()
        engine.load_checkpoint(tmp_path, load_rng=False)
        assert draws() not in (first, then)


def test_dropout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Stack(run=lambda block, x: nn.functional.dropout(block(x), 0.2))

    with engine_of(make) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path)
        losses = train(engine, BATCHES[3:])
    with engine_of(make, seed=7) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[3:]) == losses


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with engine_of(Normed) as engine, pytest.raises(CheckpointError, match="another model"):
        engine.load_checkpoint(tmp_path)
    with engine_of(optimizer="Adam") as engine, pytest.raises(CheckpointError, match="Adam"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("into", ["fp32", "8bit"])
def test_frozen_parameters_go_with_any_format(tmp_path: Path, into: str) -> None:
    def frozen() -> nn.Module:
        model = Stack(depth=4)
        for parameter in (*model.blocks[0].parameters(), *model.blocks[2].parameters(), model.embedding.weight):
            parameter.requires_grad_(False)
        return model

    with engine_of(frozen, bf16=True) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path)
        expected = parameters_of(engine)
    with engine_of(frozen, seed=7, bf16=True, moments=into) as engine:
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())
        train(engine, BATCHES[3:5])


def test_converted_moments_draw_by_their_place_in_the_model(tmp_path: Path) -> None:
    """Equal values in other parameters, or in other blocks of one, are rounded differently."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(512)), nn.Parameter(torch.zeros(512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first * x + self.second * x).sum()

    with open_engine(Twins(), engine_config()) as engine:
        train(engine, [(torch.randn(256, generator=torch.Generator().manual_seed(1)).repeat(2),)])
        engine.save_checkpoint(tmp_path)
    with open_engine(Twins(), engine_config(moments="8bit")) as engine:
        engine.load_checkpoint(tmp_path)
        found = states_of(engine)
    halves = (slice(256), slice(256, 512))
    blocks = [found[f"{name}/exp_avg_8bit"][half] for name in ("first", "second") for half in halves]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(blocks, 2))


@pytest.mark.parametrize("tag", ["latest", ".hidden", "a/b", "..", ".", "", "a/", "/a", "a\0b"])
def test_names_that_no_checkpoint_may_have(tag: str, tmp_path: Path) -> None:
    """Invalid tags, such as the name of the file `latest`, are rejected, and that file is unchanged."""
    with open_engine(seeded(Stack), engine_config()) as engine:
        engine.save_checkpoint(tmp_path, "good")
        with pytest.raises(CheckpointError, match="cannot be the name"):
            engine.save_checkpoint(tmp_path, tag)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
        assert engine.load_checkpoint(tmp_path)[0].name == "good"


def test_a_directory_without_a_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory is rejected; the current folder must be passed as "."."""
    monkeypatch.chdir(tmp_path)
    with open_engine(seeded(Stack), engine_config()) as engine:
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointError, match='is "", which would be the current folder'):
                call("")
        assert not list(tmp_path.iterdir())
        engine.save_checkpoint(".", "a")
        assert engine.load_checkpoint(".")[0].name == "a"

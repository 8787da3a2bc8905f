"""Checkpoints of a durable run: copies of its committed slots, equal to those of a run that is not durable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import infinity
from durable import saving_cases as cases
from durable.conversion_cases import WIDTH, Mixed, assert_same, config, everything, opened, train
from infinity.checkpoint import committed
from infinity.checkpoint.background import Saving
from infinity.checkpoint.committed import clone_range, open_shards
from infinity.checkpoint.export import export
from infinity.checkpoint.format import read_index
from infinity.checkpoint.tensors import WEIGHTS
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, ChecksumError, UsageError
from infinity.tiers.transfer import Transfer
from support.loops import open_engine
from support.models import seeded
from support.mounts import mount
from support.ranks import Group, RankFailed

STEPS = 3
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False},
    "8-bit moments": {"moments": "8bit"},
    "fp32 masters": {"master": "fp32", "moments": "bf16"},
    "next forward": {"clip": 1.0, "update": "next_forward"},
    "after backward": {"update": "after_backward"},
    "host memory": {"device": "cpu"},
    "host memory, next forward": {"device": "cpu", "update": "next_forward", "moments": "8bit"},
    "fp16": {"bf16": False, "fp16": {"initial_scale_power": 8}},
    "SGD": {"optimizer": "SGD"},
}


def is_copied(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the files of a durable run."""
    names = {path.name for path in checkpoint.iterdir()}
    assert ("states-00000.bin" in names) != ("unit-00000.safetensors" in names)
    return "states-00000.bin" in names


def reads(engine: TrainingEngine) -> int:
    found = engine.parts.tiers["nvme"].bytes_read
    assert isinstance(found, int)
    return found


def of_checkpoint(folder: Path, saved: Path, **options: Any) -> dict[str, Any]:
    """Return what a load gives an engine of other initial values and other random numbers."""
    torch.manual_seed(77)
    with opened(str(folder), 1, seed=9, durable=False, lr=0.5, **options) as engine:
        _, client_state = engine.load_checkpoint(saved)
        return everything(engine) | {
            "client_state": client_state,
            "random": torch.get_rng_state(),
            "progress": (engine.global_steps, engine.skipped_steps, engine.loss_scale.state_dict()),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
        }


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_loads_the_bits_of_an_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    """Parameters, moments, buffers, loss scale, schedule, RNG states and client_state; and it costs no reads."""
    options = FORMATS[name]
    for durable in (True, False):
        torch.manual_seed(5)
        folder = tmp_path / f"durable {durable}"
        folder.mkdir()
        with opened(str(folder), 1, durable=durable, **options) as engine:
            train(engine, range(STEPS))
            engine.settle()
            before = reads(engine) if durable else 0
            path = engine.save_checkpoint(folder / "saved", client_state={"epoch": 2})
            assert is_copied(path) == durable
            if durable:
                assert reads(engine) == before
                train(engine, range(STEPS, STEPS + 3))  # which overwrite both slots
    copied, ordinary = (
        of_checkpoint(tmp_path, tmp_path / f"durable {durable}" / "saved", **options) for durable in (True, False)
    )
    assert_same(copied, ordinary)


def test_a_save_waits_for_the_commit_of_its_step(tmp_path: Path) -> None:
    """Without a settle before it; each checkpoint has its own step."""
    expected = []
    with opened(str(tmp_path), 1) as engine:
        for step in range(4):
            train(engine, range(step, step + 1))
            path = engine.save_checkpoint(tmp_path / "saved", tag=str(step))
            assert is_copied(path)
            expected.append(everything(engine))
    with opened(str(tmp_path), 1, seed=9, durable=False) as engine:
        for step, states in enumerate(expected):
            engine.load_checkpoint(tmp_path / "saved", tag=str(step))
            assert engine.global_steps == step + 1
            assert_same(everything(engine), states)


def test_steps_go_on_while_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after the save does not wait; the next one, which writes the copied slots, does."""
    asked, waited = threading.Event(), threading.Event()
    copied, clone = Saving.snapshot_read, committed.clone_range

    class Watched:
        def __init__(self, transfer: Transfer) -> None:
            self.transfer = transfer

        def wait(self) -> None:
            if not self.transfer.done():
                waited.set()
                asked.set()
            self.transfer.wait()

        def done(self) -> bool:
            return self.transfer.done()

    def slowly(*arguments: int) -> None:
        assert asked.wait(60)
        clone(*arguments)

    monkeypatch.setattr(Saving, "snapshot_read", lambda saving, unit: Watched(copied(saving, unit)))
    monkeypatch.setattr(committed, "clone_range", slowly)
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
        expected = everything(engine)
        path = engine.save_checkpoint(tmp_path / "saved", background=True)
        assert engine.updates.durable is not None
        train(engine, range(STEPS, STEPS + 1))
        engine.updates.durable.wait()
        assert not waited.is_set()
        train(engine, range(STEPS + 1, STEPS + 2))
        engine.updates.durable.wait()
        asked.set()
        assert engine.saving is not None
        assert engine.saving.wait() == path
        assert waited.is_set()
        assert is_copied(path)
    with opened(str(tmp_path), 1, seed=9, durable=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(everything(engine), expected)


@pytest.mark.parametrize("device", ["nvme", "cpu"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_an_edit_after_the_step_is_saved(device: str, update: str, tmp_path: Path) -> None:
    """From the tiers, since the commit has the values before it."""
    with opened(str(tmp_path), 1, device=device, update=update, bf16=False) as engine:
        train(engine, range(STEPS))
        with infinity.GatheredParameters([engine.module.first.weight], modifier_rank=0):
            engine.module.first.weight.data.fill_(0.25)
        path = engine.save_checkpoint(tmp_path / "saved")
        assert not is_copied(path)
        expected = everything(engine)
        assert (expected["first.weight/master"] == 0.25).all()
        train(engine, range(STEPS, STEPS + 1))
        assert is_copied(engine.save_checkpoint(tmp_path / "next"))
    with opened(str(tmp_path), 1, seed=9, durable=False, bf16=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(everything(engine), expected)


def test_a_save_before_the_first_commit_is_an_ordinary_one(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        path = engine.save_checkpoint(tmp_path / "saved")
        assert not is_copied(path)
        expected = everything(engine)
    with opened(str(tmp_path), 1, seed=9, durable=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(everything(engine), expected)


def test_a_run_that_is_not_loaded_is_not_saved(tmp_path: Path) -> None:
    """The checkpoint has the states of the engine, not those of the commit in its folder."""
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
    with opened(str(tmp_path), 1, seed=9) as engine:
        path = engine.save_checkpoint(tmp_path / "saved")
        assert not is_copied(path)
        assert read_index(path).global_steps == 0


@pytest.mark.parametrize(
    ("directory", "tag"), [("", "run"), ("run", "0001"), ("run", None), ("0", "data"), ("0", "file")]
)
def test_a_save_replaces_no_run_and_no_data(directory: str, tag: str | None, tmp_path: Path) -> None:
    (tmp_path / "0" / "data").mkdir(parents=True)
    (tmp_path / "0" / "data" / "text").write_text("kept")
    (tmp_path / "0" / "file").write_text("kept")
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"is no checkpoint, which the save would delete|of a durable run"):
            engine.save_checkpoint(tmp_path / directory, tag=tag)
        assert sorted(tmp_path.rglob("*")) == before
        losses = train(engine, range(STEPS, STEPS + 2))
        assert all(loss == loss for loss in losses)
    with opened(str(tmp_path), 1, seed=9) as engine:
        assert engine.resume() == {"next": STEPS + 2}


def test_a_save_replaces_a_checkpoint_and_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "saved" / "tag").mkdir(parents=True)
    with opened(str(tmp_path), 1) as engine:
        for step in range(2):
            train(engine, range(step, step + 1))
            path = engine.save_checkpoint(tmp_path / "saved", tag="tag")
            assert read_index(path).global_steps == step + 1


def test_paths_stay_when_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of later commits, and the files of a save in the background, belong to the paths as they were given."""
    for folder in ("nvme", "elsewhere/nvme/run/0001", "elsewhere/saved"):
        (tmp_path / folder).mkdir(parents=True)
    moved, clone = threading.Event(), committed.clone_range

    def late(*arguments: int) -> None:
        assert moved.wait(60)
        clone(*arguments)

    monkeypatch.setattr(committed, "clone_range", late)
    monkeypatch.chdir(tmp_path)
    with opened("nvme", 1) as engine:
        train(engine, range(STEPS))
        engine.save_checkpoint("saved", background=True)
        os.chdir("elsewhere")
        moved.set()
        assert engine.saving is not None
        engine.saving.wait()
        train(engine, range(STEPS, STEPS + 3))
    assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()]
    assert is_copied(tmp_path / "saved" / f"global_step{STEPS}")
    with opened(str(tmp_path / "nvme"), 1, seed=9) as engine:
        assert engine.resume() == {"next": STEPS + 3}


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_a_resumed_run_is_copied_before_its_first_step(device: str, tmp_path: Path) -> None:
    with opened(str(tmp_path), 1, device=device) as engine:
        train(engine, range(STEPS))
        expected = everything(engine)
    with opened(str(tmp_path), 1, seed=9, device=device) as engine:
        engine.resume()
        before = reads(engine)
        assert is_copied(engine.save_checkpoint(tmp_path / "saved"))
        assert reads(engine) == before
    with opened(str(tmp_path), 1, seed=9, durable=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(everything(engine), expected)


def test_a_save_between_micro_batches_needs_their_gradients_dropped(tmp_path: Path) -> None:
    chosen = config(str(tmp_path), 1, accumulation=2, bf16=False)
    with open_engine(seeded(Mixed, 0), chosen) as engine:
        for number in range(5):
            if number == 4:
                expected = {k: v for k, v in everything(engine).items() if k != "seen"}
            engine.backward(engine(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))))
            engine.step()
        with pytest.raises(UsageError, match="a checkpoint holds no gradients"):
            engine.save_checkpoint(tmp_path / "saved")
        engine.drop_gradients()
        path = engine.save_checkpoint(tmp_path / "saved")
        assert is_copied(path)
    with opened(str(tmp_path), 1, seed=9, durable=False, bf16=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert read_index(path).global_steps == engine.global_steps == 2
        assert_same({k: v for k, v in everything(engine).items() if k != "seen"}, expected)


def test_a_part_of_the_parameters_is_saved_as_before(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
        path = engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
        assert not is_copied(path)
        assert "frozen.weight" not in read_index(path).parameters


@pytest.mark.parametrize("shares", ["equal", [1, 4, 2]])
def test_striped_states_are_copied(tmp_path: Path, shares: Any) -> None:
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for folder in folders:
        folder.mkdir()
    chosen = config([str(folder) for folder in folders], 1, aio={"block_size": 65536, "shares": shares})  # type: ignore[arg-type]
    with (
        pytest.warns(RuntimeWarning, match="on one file system"),
        open_engine(seeded(Mixed, 0).bfloat16(), chosen) as engine,
    ):
        train(engine, range(STEPS))
        engine.settle()
        before = reads(engine)
        assert is_copied(engine.save_checkpoint(tmp_path / "saved"))
        assert reads(engine) == before
        expected = everything(engine)
    with opened(str(tmp_path), 1, seed=9, durable=False) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(everything(engine), expected)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), (1, 2)])
def test_ranks_copy_their_own_states(groups: dict[int, Group], before: int, after: int, tmp_path: Path) -> None:
    """Into one checkpoint, which any number of ranks loads."""
    found = groups[before].run(cases.saved, folder=str(tmp_path), ranks=before, steps=STEPS)
    assert [each["read"] for each in found] == [0] * before
    assert read_index(tmp_path / "saved" / "global_step3").shards == before
    for each in groups[after].run(cases.loaded, folder=str(tmp_path), ranks=after):
        assert_same(each["states"], found[0]["states"])
        assert each["client_state"] == {"steps": STEPS}


@pytest.mark.parametrize("stage", [0, 2])
def test_replicated_states_are_copied_once(groups: dict[int, Group], stage: int, tmp_path: Path) -> None:
    found = groups[2].run(cases.saved, folder=str(tmp_path), ranks=2, steps=STEPS, stage=stage, device="none")
    (each,) = groups[1].run(cases.loaded, folder=str(tmp_path), ranks=1)
    assert_same(each["states"], found[0]["states"])


def test_a_rank_that_fails_leaves_no_checkpoint(groups: dict[int, Group], tmp_path: Path) -> None:
    """All ranks raise, and training goes on."""
    found = groups[2].run(cases.failing_on_one_rank, folder=str(tmp_path), ranks=2)
    for text, left, losses in found:
        assert text.startswith("CheckpointError: the checkpoint ")
        assert "No space left on device" in text
        assert (left, len(losses)) == ([], 1)


def test_a_kill_in_a_save_leaves_the_checkpoint_before_it(groups: dict[int, Group], tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the process ended"):
        groups[1].run(cases.killed_in_a_save, folder=str(tmp_path), ranks=1)
    visible = sorted(path.name for path in (tmp_path / "saved").iterdir() if not path.name.startswith("."))
    assert visible == ["global_step1", "latest"]
    (each,) = groups[1].run(cases.loaded, folder=str(tmp_path), ranks=1)
    assert each["client_state"] == {"steps": 1}
    with opened(str(tmp_path), 1) as engine:
        assert engine.resume() is not None
        engine.save_checkpoint(tmp_path / "saved")
    assert not [path for path in (tmp_path / "saved").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("checked", [True, False], ids=["seen before", "while copying"])
def test_a_full_drive_is_one_error(checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small))
    try:
        if not checked:
            monkeypatch.setattr("infinity.checkpoint.save.check_space", lambda folder, nbytes: None)
        with opened(str(tmp_path), 1) as engine:
            losses = train(engine, range(2))
            with pytest.raises(CheckpointError, match=r"could not be written: .*(free space|No space left)"):
                engine.save_checkpoint(small / "saved")
            assert list(small.iterdir()) == []
            losses += train(engine, range(2, 4))
            assert is_copied(engine.save_checkpoint(tmp_path / "saved"))
    finally:
        unmount()
    with opened(str(tmp_path), 1, durable=False) as engine:
        assert train(engine, range(4)) == losses


def altered(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_altered_copy_is_refused(tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(STEPS))
        path = engine.save_checkpoint(tmp_path / "saved")
        altered(path / "states-00000.bin")
        with pytest.raises(CheckpointError, match=r"states-00000\.bin was altered since it was written"):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=r"states-00000\.bin was altered since it was written"):
            export(path, tmp_path / "out")


def test_damaged_slots_are_found_by_checksums(tmp_path: Path) -> None:
    """By `aio.checksum`, before they become a checkpoint."""
    with opened(str(tmp_path), 1, aio={"checksum": True}) as engine:
        train(engine, range(STEPS))
        assert is_copied(engine.save_checkpoint(tmp_path / "saved"))
        engine.settle()
        states = tmp_path / "run" / "0001" / "rank-00000.states"
        states.write_bytes(bytes(byte ^ 1 for byte in states.read_bytes()))
        with pytest.raises(ChecksumError, match="checksum mismatch in the committed states"):
            engine.save_checkpoint(tmp_path / "saved", tag="damaged")
    assert not (tmp_path / "saved" / "damaged").exists()


def layout_with(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a layout, with a checkpoint that has the checksums of the result."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    index = read_index(path.parent)
    index.file_bytes[path.name] = path.stat().st_size
    (path.parent / "checkpoint.json").write_text(index.to_json())


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout["units"][0]["slots"][0].__setitem__(0, "other"),
        lambda layout: layout.__setitem__("moments", "bf16"),
        lambda layout: layout.__setitem__("shards", 2),
        lambda layout: layout["extents"].pop(),
        lambda layout: layout["extents"][0].__setitem__(2, 1 << 40),
        lambda layout: layout.__setitem__("nbytes", layout["nbytes"] + 4096),
        lambda layout: layout.clear(),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(1))
        path = engine.save_checkpoint(tmp_path / "saved")
        layout_with(path / "layout-00000.json", change)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path / "saved", verify=False)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places_in(each, (*path, key))


def test_no_value_in_a_layout_is_trusted(tmp_path: Path) -> None:
    """A reader gets bytes of the file or a CheckpointError, and memory for no more than the parameters of the index."""
    with opened(str(tmp_path), 1, moments="8bit") as engine:
        train(engine, range(1))
        saved = engine.save_checkpoint(tmp_path / "saved")
    index, file = read_index(saved), saved / "layout-00000.json"
    content = file.read_text()
    refused = 0
    for path in places_in(json.loads(content)):
        for wrong in (None, "x", -1, 1.5, True, 1 << 70, (1 << 40) + 1, [], {}, [[]]):
            whole: Any = {"layout": json.loads(content)}
            parent, last = whole, "layout"
            for key in path:
                parent, last = parent[last], key
            parent[last] = wrong
            file.write_text(json.dumps(whole["layout"]))
            try:
                shards = open_shards(index, saved)
                for name in index.parameters:
                    for kind in index.kinds(name):
                        shards.read(name, kind)
            except CheckpointError:
                refused += 1
    assert refused > 1000


def test_exports_are_those_of_an_ordinary_checkpoint(tmp_path: Path) -> None:
    for durable in (True, False):
        with opened(str(tmp_path), 1, durable=durable) as engine:
            train(engine, range(STEPS))
            assert is_copied(engine.save_checkpoint(tmp_path / f"{durable}")) == durable
        for dtype in (None, "fp32"):
            export(tmp_path / f"{durable}", tmp_path / f"{durable} {dtype}", dtype=dtype)
    for dtype in (None, "fp32"):
        one, other = ((tmp_path / f"{durable} {dtype}" / WEIGHTS).read_bytes() for durable in (True, False))
        assert one == other
    one, other = (get_fp32_state_dict_from_zero_checkpoint(tmp_path / f"{durable}") for durable in (True, False))
    assert_same(one, other)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "place", "nbytes"), [(0, 0, 1 << 20), (4096, 8192, 8192), (3, 7, 100_001)])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["one file system", "two file systems"])
def test_a_range_of_a_file_is_copied(start: int, place: int, nbytes: int, elsewhere: bool, tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    (tmp_path / "source").write_bytes(content)
    folder = tmp_path / "other"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "tmpfs", str(folder)) if elsewhere else lambda: None
    try:
        with open(tmp_path / "source", "rb") as source, open(folder / "target", "w+b") as target:
            clone_range(source.fileno(), start, target.fileno(), place, nbytes)
            target.seek(place)
            assert target.read() == content[start : start + nbytes]
            with pytest.raises(OSError, match="the file ends before byte"):
                clone_range(source.fileno(), (1 << 20) - 5, target.fileno(), 0, 6)
    finally:
        unmount()


@pytest.fixture(params=["xfs", "btrfs"])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system whose files may share bytes."""
    kind, folder, image = request.param, tmp_path / "sharing", tmp_path / "image"
    program = shutil.which(f"mkfs.{kind}")
    if program is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([program, "-q", str(image)], check=True)
    unmount = mount("-t", kind, "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        unmount()


def used(folder: Path) -> int:
    os.sync()
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_a_checkpoint_shares_the_bytes_of_the_run(sharing: Path) -> None:
    """Until training writes the slots again, which leaves the checkpoint as it was."""
    run = sharing / "run of it"
    run.mkdir()

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    def step(engine: TrainingEngine) -> None:
        engine.backward(engine(torch.randn(8, 512)))
        engine.step()

    with open_engine(seeded(Wide, 0), config(str(run), 1, bf16=False)) as engine:
        for _ in range(STEPS):
            step(engine)
        engine.settle()
        assert engine.updates.durable is not None
        engine.updates.durable.wait()
        before = used(sharing)
        path = engine.save_checkpoint(sharing / "saved")
        nbytes = (path / "states-00000.bin").stat().st_size
        assert nbytes > 12 << 20
        assert used(sharing) - before < nbytes // 4
        expected = everything(engine)
        for _ in range(3):
            step(engine)
        engine.settle()
        engine.updates.durable.wait()
        assert used(sharing) - before > nbytes // 2
        engine.load_checkpoint(sharing / "saved")
        assert_same(everything(engine), expected)


@pytest.mark.parametrize("durable", [True, False])
def test_zero_to_fp32_finds_an_altered_byte(durable: bool, tmp_path: Path) -> None:
    with opened(str(tmp_path), 1, durable=durable) as engine:
        train(engine, range(STEPS))
        path = engine.save_checkpoint(tmp_path / "saved")
    states = path / ("states-00000.bin" if durable else "unit-00001.safetensors")
    content = bytearray(states.read_bytes())
    content[-5000] ^= 1
    states.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{states.name} was altered since it was written"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")

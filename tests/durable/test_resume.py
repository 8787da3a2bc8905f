"""A durable run that ends anywhere goes on with the bits of a run that never ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.durable import run as durable_run
from infinity.durable.commits import Commits
from infinity.durable.folder import is_run
from infinity.durable.manifest import read_manifest
from infinity.durable.record import Record, read_record, write_record
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, ChecksumError, ConfigError, StorageError, UsageError
from infinity.plan.placement import CALLED, Extent
from infinity.tiers.durable import DurableTier
from infinity.tiers.files import SwapFile
from infinity.tiers.transfer import Transfer
from support.configs import PLACEMENTS, engine_config, raw
from support.late_device import LateDevice
from support.late_disk import LateTransfer
from support.loops import Result, assert_same, open_engine, parameters_of
from support.models import VOCABULARY, Stack, seeded
from support.ranks import Group, RankFailed

STEPS = 6


class Noisy(Stack):
    """A stack with dropout and a buffer that changes in each forward."""

    def __init__(self, depth: int) -> None:
        super().__init__(32, depth)
        self.register_buffer("seen", torch.zeros(2))
        self.drop = nn.Dropout(0.1)
        self.run = lambda block, x: self.drop(block(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.float().mean()
        return super().forward(tokens, targets)


def model(depth: int = 2) -> Noisy:
    torch.manual_seed(0)
    return Noisy(depth)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def go_on(
    engine: TrainingEngine, first: int, steps: int, after_step: Callable[[int], None] = lambda number: None
) -> list[float]:
    losses = []
    for number in range(first, steps):
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step(client_state={"next": number + 1})
        losses.append(loss.item())
        after_step(number + 1)
    return losses


def uninterrupted(config: Any) -> Result:
    with open_engine(model(), config) as engine:
        torch.manual_seed(1)
        losses = go_on(engine, 0, STEPS)
        return Result([*losses, *engine.module.seen.tolist()], parameters_of(engine))


def assert_resumes(folder: Path, losses: list[float], at_least: int, expected: Result, **options: Any) -> int:
    """Resume the run in `folder`, train the rest, and compare. Returns the step from which it went on."""
    with open_engine(model(), engine_config(folder=folder, durable=True, **options)) as engine:
        torch.manual_seed(3)
        state = engine.resume()
        assert state is not None
        first = state["next"]
        assert first >= at_least and engine.global_steps == first
        losses = losses[:first] + go_on(engine, first, STEPS)
        assert_same(Result([*losses, *engine.module.seen.tolist()], parameters_of(engine)), expected)
    return int(first)


@pytest.mark.parametrize("vertical", [True, False])
def test_a_run_of_whole_steps_resumes(tmp_path: Path, vertical: bool) -> None:
    """`train_batch` commits its client_state, in vertical order and in that of a loop."""
    make = (lambda: seeded(lambda: Stack(32, 4))) if vertical else model
    config = engine_config(folder=tmp_path, durable=True, accumulation=2, prefetch_bytes=0)

    def steps(engine: TrainingEngine, first: int, last: int) -> list[float]:
        blocks = engine.module.blocks if vertical else None
        return [
            engine.train_batch(
                iter([batch(2 * n), batch(2 * n + 1)]), blocks=blocks, client_state={"next": n + 1}
            ).item()
            for n in range(first, last)
        ]

    with open_engine(make(), engine_config(folder=tmp_path, accumulation=2, prefetch_bytes=0)) as engine:
        torch.manual_seed(1)
        expected = Result(steps(engine, 0, STEPS), parameters_of(engine))
        assert not engine._batches.reason
    with open_engine(make(), config) as engine:
        torch.manual_seed(1)
        losses = steps(engine, 0, 4)
    with open_engine(make(), config) as engine:
        assert engine.resume() == {"next": 4}
        assert_same(Result(losses + steps(engine, 4, STEPS), parameters_of(engine)), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("rows", [8, 64])
def test_frozen_parameters_of_any_width_resume(rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """The shard of a few codes of one byte is shorter than a record."""

    class Coded(Stack):
        def __init__(self) -> None:
            super().__init__(32, 2)
            self.codes = nn.Parameter(torch.ones(rows, 64).to(dtype), requires_grad=False)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) * self.codes.float().mean()

    config = engine_config(folder=tmp_path, durable=True)
    with open_engine(seeded(Coded), config) as engine:
        losses = go_on(engine, 0, 3)
    with open_engine(seeded(Coded), config) as engine:
        assert engine.resume() == {"next": 3}
        losses += go_on(engine, 3, STEPS)
        assert bool((engine.state_dict()["codes"].float() == 1).all())
    with open_engine(seeded(Coded), engine_config(folder=tmp_path)) as engine:
        assert go_on(engine, 0, STEPS) == losses


def copy_between_records(folder: Path, to: Path) -> None:
    """Copy files while none of the run's records changes: a copy takes longer than a moment, which a kill does not."""

    def records() -> list[bytes]:
        return [path.read_bytes() for path in sorted(folder.rglob("*.record-*"))]

    while True:
        before = records()
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.part"))  # a manifest that is being written
        if records() == before:
            return
        shutil.rmtree(to)


OPTIONS = {
    "during backward": {},
    "during backward and in the next forward": {"forward_updates": 0.5},
    "clipping, next forward": {"clip": 0.5},
    "after backward": {"update": "after_backward", "clip": 0.5},
    "bf16, 8 bit": {"bf16": True, "moments": "8bit"},
    "bf16, fp32 masters": {"bf16": True, "master": "fp32", "clip": 0.5},
    "tiles, checksums": {"tile_size": 4096, "clip": 0.5, "aio": {"checksum": True}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_crash_after_any_step_resumes_the_last_commit(tmp_path: Path, options: dict[str, Any]) -> None:
    """A killed process leaves what a copy of the folder has."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    expected = uninterrupted(engine_config(folder=nvme, **options))
    copies: list[Path] = []

    def crash(number: int) -> None:
        copies.append(tmp_path / f"copy-{number}")
        copy_between_records(nvme, copies[-1])

    with open_engine(model(), engine_config(folder=nvme, durable=True, **options)) as engine:
        torch.manual_seed(1)
        losses = go_on(engine, 0, STEPS, crash)
        assert_same(Result([*losses, *engine.module.seen.tolist()], parameters_of(engine)), expected)
    for number, copy in enumerate(copies[1:-1], 2):
        assert assert_resumes(copy, losses, number - 1, expected, **options) in (number - 1, number)
        shutil.rmtree(copy)


def placements(alike: bool) -> list[Any]:
    """All of PLACEMENTS; those on a diagonal of the tiers of parameters and optimizer states are not slow."""
    chosen = [PLACEMENTS[4 * n] if alike else PLACEMENTS[3 * n + (n + 1) % 3] for n in range(3)]
    return [pytest.param(*each, marks=[] if each in chosen else [pytest.mark.slow]) for each in PLACEMENTS]


@pytest.mark.parametrize(("param", "optim"), placements(alike=False))
def test_states_in_every_tier_are_durable(tmp_path: Path, param: str, optim: str) -> None:
    options: dict[str, Any] = {"param": param, "optim": optim, "clip": 0.5}
    expected = uninterrupted(engine_config(folder=tmp_path, **options))
    with open_engine(model(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        torch.manual_seed(1)
        losses = go_on(engine, 0, 3)
    assert assert_resumes(tmp_path, losses, 3, expected, **options) == 3


@pytest.mark.parametrize(("param", "optim"), placements(alike=True))
def test_states_of_a_device_with_late_copies_are_durable(tmp_path: Path, param: str, optim: str) -> None:
    options: dict[str, Any] = {"param": param, "optim": optim}
    ends = []
    for folder, durable in ((tmp_path / "plain", False), (tmp_path / "durable", True)):
        folder.mkdir()
        config = engine_config(folder=folder, durable=durable, **options)
        with open_engine(model(), config, LateDevice()) as engine:
            torch.manual_seed(1)
            go_on(engine, 0, 3 if durable else STEPS)
            ends.append(engine.state_dict())
    with open_engine(model(), config, LateDevice()) as engine:
        assert engine.resume() == {"next": 3}
        assert_same(Result([], engine.state_dict()), Result([], ends[1]))
        go_on(engine, 3, STEPS)
        assert_same(Result([], engine.state_dict()), Result([], ends[0]))


@pytest.mark.parametrize(("param", "optim"), [("none", "cpu"), ("cpu", "nvme"), ("none", "none")])
def test_a_late_commit_misses_no_update_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: str, optim: str
) -> None:
    """The next step's updates wait for the commit, and are those of the next commit."""
    write_through = Commits._write_through

    def late(*arguments: Any, **options: Any) -> None:
        time.sleep(0.1)  # the next step's updates are submitted meanwhile
        write_through(*arguments, **options)

    monkeypatch.setattr(Commits, "_write_through", late)
    config = engine_config(param, optim, folder=tmp_path, durable=True)
    with open_engine(model(), config, LateDevice()) as engine:
        go_on(engine, 0, 4)
        expected = engine.state_dict()
    with open_engine(model(), config, LateDevice()) as engine:
        assert engine.resume() == {"next": 4}
        assert_same(Result([], engine.state_dict()), Result([], expected))


def test_a_failed_sync_ends_the_run_before_its_step_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync nothing is known of what was written; another one would report success."""
    expected = uninterrupted(engine_config(folder=tmp_path))
    sync, calls = SwapFile.sync, []

    def failing(file: SwapFile) -> None:
        calls.append(file)
        if len(calls) == 3:
            raise OSError(5, "Input/output error", "drive")
        sync(file)

    monkeypatch.setattr(SwapFile, "sync", failing)
    engine = open_engine(model(), engine_config(folder=tmp_path, durable=True))
    torch.manual_seed(1)
    losses: list[float] = []
    with pytest.raises(StorageError, match=r"step 3 could not be committed .* last committed step is 2"):
        go_on(engine, 0, STEPS, lambda number: losses.append(number))
    with pytest.raises(UsageError, match="stopped"):
        engine(*batch(0))
    engine.close()
    monkeypatch.undo()
    assert assert_resumes(tmp_path, expected.losses, 2, expected) == 2


@pytest.mark.parametrize(
    "options", [{}, {"update": "after_backward"}, {"update": "next_forward"}, {"clip": 0.5}], ids=str
)
def test_no_update_follows_a_commit_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The record of a commit whose last fsync failed may have reached the drive: its slots are not written again."""
    expected = uninterrupted(engine_config(folder=tmp_path, **options))

    def failing(path: Path, record: Record) -> None:
        write_record(path, record)
        if record.progress.global_steps == 3:
            raise OSError(5, "Input/output error", str(path))

    def wait_for_the_commit(number: int) -> None:
        durable = engine.updates.durable
        assert durable is not None and durable._commits._last is not None
        while number == 3 and options.get("update") != "next_forward" and not durable._commits._last.done():
            time.sleep(0.001)

    monkeypatch.setattr(durable_run, "write_record", failing)
    engine = open_engine(model(), engine_config(folder=tmp_path, durable=True, **options))
    torch.manual_seed(1)
    with pytest.raises(StorageError, match="step 3 could not be committed"):
        go_on(engine, 0, STEPS, wait_for_the_commit)
    engine.close()
    monkeypatch.undo()
    assert assert_resumes(tmp_path, expected.losses, 3, expected, **options) == 3


@pytest.mark.parametrize("update", ["auto", "after_backward"])
def test_no_update_follows_a_commit_that_failed_during_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """A save in the background reads the tiers then, and its end permits no updates."""
    expected = uninterrupted(engine_config(folder=tmp_path, update=update))

    def failing(path: Path, record: Record) -> None:
        write_record(path, record)
        if record.progress.global_steps == 3:
            raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(durable_run, "write_record", failing)
    engine = open_engine(model(), engine_config(folder=tmp_path, durable=True, update=update))
    torch.manual_seed(1)
    go_on(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "saved", background=True)
    saving = engine.saving
    assert saving is not None
    saving.wait()
    with pytest.raises(StorageError, match="step 3 could not be committed"):
        go_on(engine, 3, STEPS)
    engine.close()
    monkeypatch.undo()
    assert assert_resumes(tmp_path, expected.losses, 3, expected, update=update) == 3
    with open_engine(model(), engine_config(folder=tmp_path)) as engine:
        _, state = engine.load_checkpoint(tmp_path / "saved")
        assert state == {} and go_on(engine, 3, STEPS) == expected.losses[3:STEPS]


def test_states_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    """Missing bytes would be read as zeros."""
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 3)
    states = next((tmp_path / "run").rglob("*.states"))
    os.truncate(states, states.stat().st_size - 1)
    for _ in range(2):  # the first attempt changes nothing
        with pytest.raises(StorageError, match=r"rank-00000\.states is cut short: it has [\d,]+ bytes of "):
            open_engine(model(), engine_config(folder=tmp_path, durable=True))


def killed(rank: int, *, folder: str) -> None:
    """Train in a process that SIGKILL ends after step 4."""
    engine = open_engine(model(), engine_config(folder=folder, durable=True))
    torch.manual_seed(1)
    go_on(engine, 0, 6, lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 4 else None)


def test_a_killed_process_resumes(groups: dict[int, Group], tmp_path: Path) -> None:
    expected = uninterrupted(engine_config(folder=tmp_path))
    with pytest.raises(RankFailed, match="the process ended"):
        groups[1].run(killed, folder=str(tmp_path))
    assert assert_resumes(tmp_path, expected.losses[:4], 3, expected) in (3, 4)


class Alternating(Stack):
    """Uses every other block in turns, so that an update waits for longer than the next forward."""

    def __init__(self) -> None:
        super().__init__(32, 6)
        self.turn = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in list(self.blocks)[self.turn % 2 :: 2]:
            x = block(x)
        self.turn += 1
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"prefetch_bytes": 0}], ids=str)
def test_units_that_the_next_forward_does_not_use_are_committed(tmp_path: Path, options: dict[str, Any]) -> None:
    def made() -> Alternating:
        torch.manual_seed(0)
        return Alternating()

    with open_engine(made(), engine_config(folder=tmp_path, **options)) as engine:
        expected_losses = go_on(engine, 0, STEPS)
        expected = engine.state_dict()
    with open_engine(made(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        losses = go_on(engine, 0, 3)
    with open_engine(made(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        assert engine.resume() == {"next": 3}
        engine.module.turn = 3
        losses += go_on(engine, 3, STEPS)
        assert_same(Result(losses, engine.state_dict()), Result(expected_losses, expected))


def test_a_skipped_step_is_committed(tmp_path: Path) -> None:
    """The loss scale of fp16 and the count of skipped steps are part of a commit."""
    options: dict[str, Any] = {"fp16": {"initial_scale_power": 32, "hysteresis": 1}}
    expected = uninterrupted(engine_config(folder=tmp_path, **options))
    with open_engine(model(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        torch.manual_seed(1)
        losses = go_on(engine, 0, 3)
        assert engine.skipped_steps > 0
        scale, skipped = engine.loss_scale.value, engine.skipped_steps
    with open_engine(model(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        engine.resume()
        assert (engine.loss_scale.value, engine.skipped_steps) == (scale, skipped)
    assert_resumes(tmp_path, losses, 3, expected, **options)


def test_edits_before_a_step_are_part_of_it(tmp_path: Path) -> None:
    """Frozen weights that the loop changes, as in a momentum encoder, are in the commit of the step."""

    def trained(engine: TrainingEngine, first: int, stop: int) -> None:
        weight = engine.module.embedding.weight
        for number in range(first, stop):
            engine.backward(engine(*batch(number)))
            with torch.no_grad():
                weight.mul_(0.9)
            engine.step()

    def frozen() -> Noisy:
        made = model(4)
        made.embedding.weight.requires_grad_(False)
        return made

    options: dict[str, Any] = {"update": "after_backward"}
    with open_engine(frozen(), engine_config(folder=tmp_path, **options)) as engine:
        torch.manual_seed(1)
        trained(engine, 0, 4)
        expected = parameters_of(engine)
    with open_engine(frozen(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        torch.manual_seed(1)
        trained(engine, 0, 2)
    with open_engine(frozen(), engine_config(folder=tmp_path, durable=True, **options)) as engine:
        engine.resume()
        trained(engine, 2, 4)
        assert_same(Result([], parameters_of(engine)), Result([], expected))


@pytest.mark.parametrize(("update", "clip"), [("during_backward", 0.0), ("next_forward", 0.5), ("after_backward", 0.0)])
def test_a_commit_waits_for_no_edit_that_waits_for_it(update: str, clip: float, tmp_path: Path) -> None:
    """On an accelerator, a thread compares the 16-bit parameters of an update while the step is being committed."""
    ends = []
    if update == "during_backward" and clip:
        pytest.skip("clipping needs the gradients of all units")
    for folder, durable in ((tmp_path / "plain", False), (tmp_path / "durable", True)):
        folder.mkdir()
        config = engine_config(folder=folder, durable=durable, update=update, bf16=True, clip=clip, cache_bytes=1 << 20)
        with open_engine(model(4), config, LateDevice()) as engine:
            torch.manual_seed(1)
            for number in range(4):
                with torch.no_grad():
                    for parameter in engine.module.parameters():
                        parameter.mul_(1.125)
                go_on(engine, number, number + 1)
            ends.append(engine.state_dict())
    assert_same(Result([], ends[1]), Result([], ends[0]))
    with open_engine(model(4), config, LateDevice()) as engine:
        assert engine.resume() == {"next": 4}
        assert_same(Result([], engine.state_dict()), Result([], ends[0]))


def test_an_edit_that_a_commit_cannot_leave_out_is_refused(tmp_path: Path) -> None:
    """The update of another unit waits for the next forward, so the step is not committed when the edit is written."""
    with open_engine(model(4), engine_config(folder=tmp_path, durable=True, clip=0.5, prefetch_bytes=0)) as engine:
        go_on(engine, 0, 3)
        with pytest.raises(UsageError, match="after_backward"), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)


def test_gathered_parameters_are_edited_while_updates_are_due(tmp_path: Path) -> None:
    """The error of a direct edit names this fix."""

    def halve(engine: TrainingEngine) -> None:
        for parameter in engine.module.parameters():
            with infinity.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.mul_(0.5)

    losses = []
    for durable in (False, True):
        config = engine_config(folder=tmp_path, durable=durable, clip=0.5, prefetch_bytes=0)
        with open_engine(model(4), config) as engine:
            torch.manual_seed(1)
            losses.append(go_on(engine, 0, 3))
            halve(engine)
            losses[-1] += go_on(engine, 3, 5)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("options", [{}, {"update": "after_backward"}], ids=str)
def test_edits_after_a_step_are_not_part_of_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """The loop makes them again when it goes on from the step."""
    (tmp_path / "nvme").mkdir()
    with open_engine(model(4), engine_config(folder=tmp_path / "nvme", durable=True, **options)) as engine:
        go_on(engine, 0, 3)
        expected = parameters_of(engine)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
        engine.settle()
        assert engine.updates.durable is not None
        engine.updates.durable.wait()
        shutil.copytree(tmp_path / "nvme", tmp_path / "copy")
    with open_engine(model(4), engine_config(folder=tmp_path / "copy", durable=True, **options)) as engine:
        assert engine.resume() == {"next": 3}
        assert_same(Result([], parameters_of(engine)), Result([], expected))


@pytest.mark.parametrize("update", ["auto", "after_backward"])
def test_an_edit_after_settle_is_not_part_of_the_step(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of an fp32 update reads the buffer that the script edits next."""
    write_at_once = DurableTier._write_at

    def write(tier: DurableTier, place: int, memory: torch.Tensor, extent: Extent, file: Any = None) -> Transfer:
        def later() -> None:
            time.sleep(0.01)  # as a slow drive
            write_at_once(tier, place, memory, extent, file).wait()

        return LateTransfer(later)

    folder = tmp_path / "nvme"
    folder.mkdir()
    options: dict[str, Any] = {"update": update}
    monkeypatch.setattr(DurableTier, "_write_at", write)
    with open_engine(model(4), engine_config(folder=folder, durable=True, **options)) as engine:
        torch.manual_seed(1)
        go_on(engine, 0, 2)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)  # exact, so that the parameters of before are known
        expected = {name: value * 2 for name, value in parameters_of(engine).items()}
        assert engine.updates.durable is not None
        engine.updates.durable.wait()
        shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.undo()
    with open_engine(model(4), engine_config(folder=tmp_path / "copy", durable=True, **options)) as engine:
        assert engine.resume() == {"next": 2}
        assert_same(Result([], parameters_of(engine)), Result([], expected))


# -- the folder --------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[Path, bytes | None]:
    """Relative path → bytes of a file; None: a folder."""
    return {each.relative_to(folder): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


CALLS = ("open", "mkdir", "rename", "unlink", "rmdir", "fsync", "ftruncate", "posix_fallocate")


@pytest.mark.parametrize("begins", ["anew", "again", "with other units", "after a run without a commit"])
def test_a_kill_between_any_two_system_calls_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """The next start finds the commit that was there, or begins anew."""
    folder, made, copies = tmp_path / "run of the test", list[Path](), list[Path]()
    folder.mkdir()
    options: dict[str, Any] = {"unit_size": 20_000} if begins == "with other units" else {}
    if begins in ("again", "with other units"):
        with open_engine(model(), engine_config(folder=folder, durable=True)) as engine:
            go_on(engine, 0, 2)
    if begins == "after a run without a commit":
        with open_engine(model(), engine_config(folder=folder, durable=True)):
            shutil.copytree(folder, tmp_path / "begun")
        shutil.copytree(tmp_path / "begun", folder, dirs_exist_ok=True)

    def copy() -> None:
        if threading.current_thread() is threading.main_thread():
            with monkeypatch.context() as undone:
                for name, plain in plainly.items():
                    undone.setattr(os, name, plain)
                made.append(tmp_path / f"copy-{len(made)}")
                shutil.copytree(folder, made[-1])
                if copies and content(made[-1]) == content(copies[-1]):
                    shutil.rmtree(made[-1])
                else:
                    copies.append(made[-1])

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*given: Any, **more: Any) -> Any:
            copy()
            try:
                return function(*given, **more)
            finally:
                copy()

        return call

    plainly = {name: getattr(os, name) for name in CALLS}
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(name))
        engine = open_engine(model(), engine_config(folder=folder, durable=True, **options))
        for name in CALLS:
            patch.setattr(os, name, plainly[name])
        with engine:
            state = engine.resume()
    assert len(made) > 10
    expected = {"next": 2} if begins in ("again", "with other units") else None
    assert state == expected
    for each in copies:
        with open_engine(model(), engine_config(folder=each, durable=True, **options)) as engine:
            assert engine.resume() == expected
        shutil.rmtree(each)


def commands(folder: Path) -> list[tuple[str, ...]]:
    manifests = [read_manifest(path) for path in (folder / "run").rglob("*.json")]
    return [manifest.command for manifest in manifests if manifest is not None]


def test_the_command_of_a_run_is_that_of_its_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that only loads the run is not what `infinity resume` executes next."""
    config = engine_config(folder=tmp_path, durable=True)
    monkeypatch.setattr(sys, "orig_argv", ["/bin/train", "--first"])
    with open_engine(model(), config) as engine:
        go_on(engine, 0, 2)
    assert commands(tmp_path) == [("/bin/train", "--first")]
    monkeypatch.setattr(sys, "orig_argv", ["/bin/evaluate"])
    with open_engine(model(), config) as engine:
        engine.load_checkpoint(tmp_path / "run")
    with open_engine(model(), config) as engine:
        engine.backward(engine(*batch(0)))
        with pytest.raises(UsageError, match=r"engine\.resume\(\)"):
            engine.step()
    assert commands(tmp_path) == [("/bin/train", "--first")]
    monkeypatch.setattr(sys, "orig_argv", ["/bin/train", "--second"])
    with open_engine(model(), config) as engine:
        assert engine.resume() == {"next": 2}
        go_on(engine, 2, 3)
    assert commands(tmp_path) == [("/bin/train", "--second")]


def test_a_manifest_that_cannot_be_written_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")}
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(sys, "orig_argv", ["/bin/another"])
    engine = open_engine(model(), engine_config(folder=tmp_path, durable=True))
    assert engine.resume() == {"next": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(StorageError, match=r"step 3 could not be committed .*Input/output error"), engine:
            go_on(engine, 2, 4)
    assert not list(tmp_path.rglob("*.part"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")} == before
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() == {"next": 2}


def test_a_folder_that_cannot_be_synced_is_an_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(StorageError, match=r"the durable run in .*/run cannot be opened: .*Input/output error"):
            open_engine(model(), engine_config(folder=tmp_path, durable=True))
    assert not list(tmp_path.rglob("*.part"))


def test_a_run_that_was_not_loaded_is_not_replaced(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
        committed = parameters_of(engine)
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        loss = engine(*batch(0))
        engine.backward(loss)
        with pytest.raises(UsageError, match=r"engine\.resume\(\)"):
            engine.step()
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() == {"next": 2}
        assert_same(Result([], parameters_of(engine)), Result([], committed))


def test_a_step_that_would_not_be_committed_is_refused(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
        engine.backward(engine(*batch(2)))
        with pytest.raises(UsageError, match=r"call engine\.step\(\) instead"):
            engine.optimizer.step()
        engine.step(client_state={"next": 3})
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() == {"next": 3}


def test_a_run_without_a_commit_leaves_no_folder(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() is None
        assert is_run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_is_private(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True, run="mine")) as engine:
        go_on(engine, 0, 2)
    paths = [tmp_path / "mine", *(tmp_path / "mine").rglob("*")]
    assert len(paths) > 4
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o700, 0o600}


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    """The record before the last has slots that were written again, and the run is not begun anew."""
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 3)
    folder = tmp_path / "run" / "0001"
    last = folder / "rank-00000.record-1"
    record = read_record(last)
    assert record is not None and record.number == 3
    assert read_record(folder / "rank-00000.record-0") is None
    content = bytearray(last.read_bytes())
    content[60] ^= 1
    last.write_bytes(content)
    for _ in range(2):  # the refusal leaves everything as it is
        with pytest.raises(CheckpointError, match="records of rank 0 are damaged"):
            open_engine(model(), engine_config(folder=tmp_path, durable=True))
    content[60] ^= 1
    last.write_bytes(content)
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() == {"next": 3}


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
    manifest = tmp_path / "run" / "0001" / "rank-00000.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:300])
    with pytest.raises(StorageError, match=r"rank-00000\.json is damaged, and the states beside it"):
        open_engine(model(), engine_config(folder=tmp_path, durable=True))
    manifest.write_bytes(content)
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        assert engine.resume() == {"next": 2}


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, durable=True)
    with open_engine(model(), config), pytest.raises(StorageError, match="in use by another process"):
        open_engine(model(), config)


def test_a_part_of_a_striped_run_is_not_written_over(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with open_engine(model(), engine_config(folder=folders, durable=True)) as engine:
        go_on(engine, 0, 3)
    for part in folders, list(reversed(folders)), folders[1:], folders[:1]:
        if part != folders:
            with (
                pytest.raises((StorageError, CheckpointError)),
                open_engine(model(), engine_config(folder=part, durable=True)) as engine,
            ):
                engine.resume()
    with open_engine(model(), engine_config(folder=folders, durable=True)) as engine:
        assert engine.resume() == {"next": 3}


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="not a folder of this user"):
        open_engine(model(), engine_config(folder=tmp_path, durable=True))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_load_checkpoint_names_the_run_of_another_engine(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        path, state = engine.load_checkpoint(tmp_path / "run")
        assert (path, state) == (tmp_path / "run", {"next": 2})


def test_a_client_state_that_cannot_be_read_back_ends_no_run(tmp_path: Path) -> None:
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        go_on(engine, 0, 2)
        engine.backward(engine(*batch(2)))
        with pytest.raises(CheckpointError, match="client_state"):
            engine.step(client_state={"model": engine})


def test_durable_states_need_a_folder() -> None:
    config = {**raw(None, "cpu", "cpu"), "infinity": {"durable": True}}
    with pytest.raises(ConfigError, match="nvme_path"):
        Config.load(config)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp", ".hidden", "a\0b"])
def test_a_run_has_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="run"):
        engine_config(durable=True, run=name)


def test_a_flipped_bit_of_a_committed_state_is_found(tmp_path: Path) -> None:
    """Checksums of a commit outlive the process that wrote it, and a resume compares its digests."""
    aio = {"checksum": True}
    with open_engine(model(), engine_config(folder=tmp_path, durable=True, aio=aio)) as engine:
        go_on(engine, 0, 3)
        assert engine.parts.plan.io is not None and engine.parts.plan.io.durable is not None
        extents = engine.parts.plan.io.durable.extents
        assert engine.updates.durable is not None
        run = engine.updates.durable.run
    record = run.record
    assert record is not None and record.number == 3
    each = extents[1]
    place = (each.first, each.second)[record.slots[1]].offset + 100
    with open(tmp_path / "run" / "0001" / "rank-00000.states", "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 4]))
    with (
        pytest.raises(ChecksumError, match="second read returned the same bytes"),
        open_engine(model(), engine_config(folder=tmp_path, durable=True, aio=aio)) as engine,
    ):
        with pytest.raises(CheckpointError, match=f"the {CALLED[each.state]} of unit .* differ from those"):
            engine.resume()
        engine.resume(verify=False)
        go_on(engine, 3, 4)


def test_a_start_forgets_the_record_whose_slots_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends between the agreement on a commit and the end of the former record leaves both."""

    def ended(run: durable_run.DurableRun) -> None:
        raise RuntimeError("the process ends")

    config = engine_config(folder=tmp_path, durable=True)
    with pytest.raises(StorageError, match="the process ends"), open_engine(model(), config) as engine:
        go_on(engine, 0, 2)
        engine.settle()
        assert engine.updates.durable is not None
        engine.updates.durable.wait()
        with monkeypatch.context() as patch:
            patch.setattr(durable_run.DurableRun, "conclude", ended)
            go_on(engine, 2, 3)
            engine.settle()
            engine.updates.durable.wait()
    records = [tmp_path / "run" / "0001" / f"rank-00000.record-{slot}" for slot in (0, 1)]
    assert sorted(record.number for path in records if (record := read_record(path)) is not None) == [2, 3]
    with open_engine(model(), config) as engine:
        assert engine.resume() == {"next": 3}
        assert [record.number for path in records if (record := read_record(path)) is not None] == [3]
    records[1].write_bytes(records[1].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="records of rank 0 are damaged"):
        open_engine(model(), config)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_run, "_write_manifest", full)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(StorageError, match=r"cannot be opened.*No space left"):
        open_engine(model(), engine_config(folder=folders, durable=True))
    assert sorted(tmp_path.rglob("*")) == folders


def test_sigterm_ends_a_forked_child(tmp_path: Path) -> None:
    """`multiprocessing.Pool` ends its workers by SIGTERM, which the trainer only notes."""
    with open_engine(model(), engine_config(folder=tmp_path, durable=True)) as engine:
        context = multiprocessing.get_context("fork")
        begun = context.Event()

        def sleep_on() -> None:
            begun.set()
            while True:  # a signal that arrives as a long sleep begins would be handled at its end
                time.sleep(0.05)

        child = context.Process(target=sleep_on)
        child.start()
        try:
            assert begun.wait(60)  # a signal that arrives before Python's work after a fork is dropped by it
            child.terminate()
            child.join(30)
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
            child.join()
        assert go_on(engine, 0, 2), "the trainer goes on"


@pytest.mark.filterwarnings("ignore:.* are on one file system")
def test_folders_in_another_order_are_refused(tmp_path: Path) -> None:
    """Parts of a stripe have the same size and would be read as one another."""
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    options: dict[str, Any] = {"durable": True, "aio": {"block_size": 1 << 16}}
    with open_engine(model(), engine_config(folder=folders, **options)) as engine:
        go_on(engine, 0, 2)
    for first, second in ((1, 2), (2, 3)):
        order = list(folders)
        order[first], order[second] = order[second], order[first]
        with pytest.raises(StorageError, match=r"is missing\..* name the folders in nvme_path .* in the same"):
            open_engine(model(), engine_config(folder=order, **options))
    with open_engine(model(), engine_config(folder=folders, **options)) as engine:
        assert engine.resume() == {"next": 2}


@pytest.mark.filterwarnings("ignore:.* are on one file system")
def test_the_first_commit_syncs_the_names_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may lose a file that was synced, with the folders that name it."""
    synced: set[Path] = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(os, "fsync", noted)
    with open_engine(model(), engine_config(folder=folders, durable=True)) as engine:
        go_on(engine, 0, 1)
    for folder in folders:
        assert {folder, folder / "run", folder / "run" / "0001"} <= synced

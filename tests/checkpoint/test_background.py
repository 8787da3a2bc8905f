"""Background saves: they hold the states as of the call, and do not change training."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.background import Saver, Saving
from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError
from infinity.units.states import UnitStates
from infinity.units.unit import Unit
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.lifetime import run_forward
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.mounts import mount
from support.paced_save import Pace
from support.states import states_of

BATCHES = token_batches(5)
SAVED_AFTER = 2
UPDATES = ("during_backward", "next_forward", "after_backward")
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "8bit": {"bf16": True, "moments": "8bit"},
    "fp32 master": {"bf16": True, "master": "fp32", "moments": "bf16"},
    "fp16": {"fp16": {"initial_scale_power": 8}, "master": "fp32"},
}


def engine_of(seed: int = 0, **options: Any) -> TrainingEngine:
    return open_engine(seeded(Stack, seed), engine_config(**options))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(folder: Path, save: str, *, late: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and save in between ("", "foreground" or "background"). Return the losses and the final states."""
    random.seed(0)
    device = LateDevice() if late else None
    batches = BATCHES * options.get("accumulation", 1)
    first = SAVED_AFTER * options.get("accumulation", 1)
    with open_engine(seeded(lambda: Stack(depth=4)), engine_config(**options), device) as engine:
        losses = train(engine, batches[:first])
        if save:
            engine.save_checkpoint(folder / save, client_state={"epoch": 3}, background=save == "background")
        losses += train(engine, batches[first:])
        return {"losses": losses, "values": parameters_of(engine) | states_of(engine), "units": len(engine.units)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["values"].keys() == other["values"].keys()
    for name, value in one["values"].items():
        assert torch.equal(value, other["values"][name]), name


def assert_saves_alike(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Assert that files equal those of a foreground save, and training equals one without a save, if every update meets
    an unread unit.
    """
    expected = run(folder, "", **options)
    assert_same(run(folder, "foreground", **options), expected)
    pace = Pace(monkeypatch)
    assert_same(run(folder, "background", **options), expected)
    tag = f"global_step{SAVED_AFTER}"
    assert content(folder / "background" / tag) == content(folder / "foreground" / tag)
    assert not pace.overdue
    assert len(pace.saved) == expected["units"]
    waited = list(dict.fromkeys(pace.waited))
    assert waited in (pace.saved, pace.saved[1:])  # the first is read at once, unless the machine is busy
    assert {path.name for path in (folder / "background").iterdir()} == {tag, "latest"}


CASES = [
    (param, optim, update, form)
    for (param, optim), update, form in zip(
        PLACEMENTS, itertools.cycle(UPDATES), itertools.cycle(list(FORMATS)[:4]), strict=False
    )
]


@pytest.mark.parametrize(("param", "optim", "update", "form"), CASES)
def test_every_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: str, optim: str, update: str, form: str
) -> None:
    assert_saves_alike(tmp_path, monkeypatch, param=param, optim=optim, update=update, **FORMATS[form])


@pytest.mark.parametrize("late_device", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_late_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, late_device: bool) -> None:
    use_late_disks(monkeypatch)
    assert_saves_alike(tmp_path, monkeypatch, late=late_device, bf16=True, update=update)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["disk", "late disk"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("param", "optim"), PLACEMENTS)
def test_the_full_product(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    param: str,
    optim: str,
    update: str,
    form: str,
    clip: float,
    late: bool,
) -> None:
    if update == "during_backward" and (clip or form == "fp16"):
        pytest.skip("needs the norm first")
    if late:
        use_late_disks(monkeypatch)
    options: dict[str, Any] = {"param": param, "optim": optim, "update": update, "clip": clip, **FORMATS[form]}
    assert_saves_alike(tmp_path, monkeypatch, late=late, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, accumulation: int) -> None:
    assert_saves_alike(tmp_path, monkeypatch, clip=0.5, accumulation=accumulation, **FORMATS[form])


class Dropping(nn.Module):
    """Buffers that training changes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_everything_else_is_of_that_moment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save holds buffers, RNG states, schedule, hyper-parameters and client_state as of the call, although they
    change while it writes.
    """
    schedule: dict[str, Any] = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9}}
    scheduler = Config.load({"train_micro_batch_size_per_gpu": 1, "scheduler": schedule}).scheduler
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 16, generator=generator),) for _ in range(5)]
    for save in ("foreground", "background"):
        pace = Pace(monkeypatch)
        random.seed(0)
        numpy.random.seed(0)
        config = engine_config(unit_size=1000).model_copy(update={"scheduler": scheduler})
        with open_engine(seeded(Dropping), config) as engine:
            train(engine, batches[:2])
            state = {"names": ["one"], "values": torch.ones(3)}
            engine.save_checkpoint(tmp_path / save, client_state=state, background=save == "background")
            state["names"].append("two")
            state["values"].zero_()
            engine.optimizer.param_groups[0]["weight_decay"] = 0.5
            random.random()
            numpy.random.rand()
            train(engine, batches[2:])
    assert pace.waited
    assert content(tmp_path / "background" / "global_step2") == content(tmp_path / "foreground" / "global_step2")
    with open_engine(seeded(Dropping, 1), config) as engine:
        assert engine.load_checkpoint(tmp_path / "background")[1]["names"] == ["one"]


# -- other writers, and readers ----------------------------------------------------------------------------------------


def edit_gathered(engine: TrainingEngine, weight: nn.Parameter) -> None:
    with infinity.GatheredParameters(weight, modifier_rank=0):
        weight.data.mul_(2)
    engine.settle()


def edit_read(engine: TrainingEngine, weight: nn.Parameter) -> None:
    with torch.no_grad():
        engine.module.blocks[1].up.weight.mul_(2)
    engine.settle()


def edit_master(engine: TrainingEngine, weight: nn.Parameter) -> None:
    infinity.set_full_fp32_param(weight, torch.ones(weight.shape))


def edit_moment(engine: TrainingEngine, weight: nn.Parameter) -> None:
    infinity.set_full_optimizer_state(weight, "exp_avg", torch.ones(weight.shape))


@pytest.mark.parametrize("param", ["none", "nvme"])
@pytest.mark.parametrize("edit", [edit_gathered, edit_read, edit_master, edit_moment])
def test_edits_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[TrainingEngine, nn.Parameter], None], param: str
) -> None:
    """Edits during a save are not in the checkpoint, and are not lost."""
    outcomes = []
    for save in ("foreground", "background"):
        pace = Pace(monkeypatch)
        with open_engine(seeded(Stack), engine_config(param=param, bf16=True)) as engine:
            train(engine, BATCHES[:2])
            weight = dict(engine.module.named_parameters())["blocks.1.up.weight"]
            engine.save_checkpoint(tmp_path / save, "a", background=save == "background")
            edit(engine, weight)
            pace.free()
            outcomes.append((states_of(engine), train(engine, BATCHES[2:]), states_of(engine)))
    assert pace.waited and not pace.overdue
    assert content(tmp_path / "background" / "a") == content(tmp_path / "foreground" / "a")
    (edited, losses, values), (others, other_losses, other_values) = outcomes
    assert losses == other_losses
    assert all(torch.equal(value, others[name]) for name, value in edited.items())
    assert all(torch.equal(value, other_values[name]) for name, value in values.items())


def test_an_edit_waits_before_its_unit_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a resident unit reaches its master when its update starts."""
    outcomes = []
    for save in ("foreground", "background"):
        pace = Pace(monkeypatch)
        config = engine_config(bf16=True, prefetch_bytes="1GiB", update="next_forward")
        with open_engine(seeded(Stack), config) as engine:
            train(engine, BATCHES[:2])
            engine.save_checkpoint(tmp_path / save, "a", background=save == "background")
            engine.backward(engine(*BATCHES[2]))
            with torch.no_grad():
                engine.module.blocks[4].up.weight.mul_(2)
            engine.step()
            pace.free()
            outcomes.append(states_of(engine))
    assert pace.waited and not pace.overdue
    assert content(tmp_path / "background" / "a") == content(tmp_path / "foreground" / "a")
    assert all(torch.equal(value, outcomes[0][name]) for name, value in outcomes[1].items())


@pytest.mark.parametrize("placement", [("nvme", "nvme"), ("none", "cpu")])
def test_reading_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: tuple[str, str]) -> None:
    """Evaluation, forward, backward and reads do not wait while the save has read only the first unit."""
    pace = Pace(monkeypatch)
    config = engine_config(*placement, update="next_forward", prefetch_bytes=0)
    with open_engine(seeded(Stack), config) as engine:
        train(engine, BATCHES[:2])
        before = states_of(engine)
        expected = run_forward(engine, *BATCHES[2])
        engine.save_checkpoint(tmp_path, background=True)
        assert pace.held.wait(20)
        assert run_forward(engine, *BATCHES[2]) == expected
        loss = engine(*BATCHES[2])
        engine.backward(loss)
        engine.drop_gradients()
        assert loss.item() == expected
        assert all(torch.equal(value, before[name]) for name, value in states_of(engine).items())
        weight = next(engine.module.parameters())
        with infinity.GatheredParameters(weight):
            assert torch.equal(weight, before["embedding.weight/master"])
        assert dict(engine.stream_state_dict())["embedding.weight"].equal(before["embedding.weight/master"])
        assert engine.saving is not None and not engine.saving.done()
        assert pace.waited == [] and len(pace.saved) == 1
        pace.free()


# -- the end of a save -------------------------------------------------------------------------------------------------


def test_wait_and_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(monkeypatch)
    with engine_of() as engine:
        assert engine.saving is None
        path = engine.save_checkpoint(tmp_path, background=True)
        assert path == tmp_path / "global_step0"
        assert pace.held.wait(20)
        assert engine.saving is not None and not engine.saving.done()
        assert not path.exists() and not (tmp_path / "latest").exists()
        pace.free()
        assert engine.saving.wait() == path
        assert engine.saving.done() and (tmp_path / "latest").read_text() == path.name


@pytest.mark.parametrize("second", [False, True], ids=["foreground", "background"])
def test_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: bool) -> None:
    """A save of either kind waits for the previous one, and `latest` names the later one."""
    with engine_of() as engine:
        for number, batch in enumerate(BATCHES):
            train(engine, [batch])
            engine.save_checkpoint(tmp_path, "a", {"step": number}, background=True)
            engine.save_checkpoint(tmp_path, f"b{number}", background=second)
        train(engine, BATCHES[:1])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b0", "b1", "b2", "b3", "b4", "latest"}
    assert (tmp_path / "latest").read_text() == "b4"
    with engine_of() as engine:
        for number in range(len(BATCHES)):
            engine.load_checkpoint(tmp_path, f"b{number}")
            assert engine.global_steps == number + 1


def test_joining_waits_until_it_has_ended(tmp_path: Path) -> None:
    go = threading.Event()

    class Ended(Future[None]):
        """The end of a save that goes on once somebody waits for it."""

        def result(self, timeout: float | None = None) -> None:
            go.set()
            return super().result(60)

    saving, saver = Saving(tmp_path, []), Saver()
    saving._ended = Ended()
    saver.start(saving, lambda saving: None if go.wait(60) else pytest.fail("nobody waits"))
    try:
        saver.join()
        assert saving.done()
    finally:
        go.set()
        saver.close(lambda: None)


def test_an_interrupt_while_the_engine_closes_stops_the_save(tmp_path: Path) -> None:
    """The wait for its end is the one that can be interrupted: a thread that is being joined cannot be."""
    stopped = threading.Event()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    class Stopping(Saving):
        def stop(self) -> None:
            stopped.set()

    saving, saver = Stopping(tmp_path, []), Saver()
    saving._ended = Interrupted()
    saver.start(saving, lambda saving: None if stopped.wait(20) else pytest.fail("it was not stopped"))
    closed = []
    with pytest.raises(KeyboardInterrupt):
        saver.close(lambda: closed.append(saving.done()))
    assert closed == [True]


def test_loading_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3}, background=True)
        losses = train(engine, BATCHES[2:])
        engine.save_checkpoint(tmp_path, "later", background=True)
        assert engine.load_checkpoint(tmp_path)[0].name == "later"
        assert engine.load_checkpoint(tmp_path, "global_step2")[1] == {"epoch": 3}
        assert train(engine, BATCHES[2:]) == losses


def end_by_closing(box: list[TrainingEngine]) -> None:
    box.pop().close()


def end_by_an_error(box: list[TrainingEngine]) -> None:
    with contextlib.suppress(ValueError), box.pop():
        raise ValueError


def end_by_dropping(box: list[TrainingEngine]) -> None:
    saving = [thread for thread in threading.enumerate() if thread.name == "infinity-save"]
    box.clear()
    gc.collect()
    for thread in saving:
        thread.join(20)


@pytest.mark.parametrize("end", [end_by_closing, end_by_an_error, end_by_dropping])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_end_of_the_engine_waits_for_it(
    tmp_path: Path, end: Callable[[list[TrainingEngine]], None], steps: int
) -> None:
    threads = set(threading.enumerate())
    box = [engine_of(update="next_forward")]
    train(box[0], BATCHES[:2])
    box[0].save_checkpoint(tmp_path / "foreground", "a")
    box[0].save_checkpoint(tmp_path / "background", "a", background=True)
    train(box[0], BATCHES[2 : 2 + steps])
    end(box)
    assert content(tmp_path / "background" / "a") == content(tmp_path / "foreground" / "a")
    for _ in range(400):
        # A thread that ends its last job, or the save, may still refer to the engine, whose objects are in cycles.
        gc.collect()
        if threads.issuperset(threading.enumerate()):
            break
        time.sleep(0.05)
    assert {thread.name for thread in threading.enumerate() if thread not in threads} == set()


def test_an_engine_that_is_collected_in_the_thread_that_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    pace = Pace(monkeypatch)
    box = [engine_of(update="next_forward")]
    train(box[0], BATCHES[:2])
    dropped = threading.Event()

    def drop() -> None:
        assert dropped.wait(20)
        if box:
            box.clear()
            gc.collect()
            pace.free()

    pace.on_hold = drop
    files = len(os.listdir("/proc/self/fd"))
    box[0].save_checkpoint(tmp_path, "a", background=True)
    saving = box[0].saving
    assert saving is not None
    loss = box[0](*BATCHES[2])
    box[0].backward(loss)
    box[0].step()
    del loss
    dropped.set()
    saving.wait()
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
    assert {thread.name for thread in threading.enumerate() if thread not in threads} == set()
    assert len(os.listdir("/proc/self/fd")) < files  # the swap file is gone
    with engine_of() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


LAST = """
import sys
import threading
import time
from pathlib import Path
import pytest
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.paced_save import Pace
pace = Pace(pytest.MonkeyPatch())
def stay():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    pace.free()
pace.on_hold = stay
engine = open_engine(seeded(Stack), engine_config(update="next_forward"))
train(engine, token_batches(2))
engine.save_checkpoint(Path(sys.argv[1]), background=True)
train(engine, token_batches(1))
"""


def python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", *arguments], text=True, env=environment, **options)


def test_a_process_that_ends_without_closing(tmp_path: Path) -> None:
    """The process completes a save of which one unit has been read."""
    process = python(LAST, str(tmp_path), stderr=subprocess.PIPE)
    text = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "Error" not in text, text
    with engine_of() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


HELD = """
import sys
import threading
from pathlib import Path
import pytest
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.paced_save import Pace
engine = open_engine(seeded(Stack), engine_config())
train(engine, token_batches(2))
engine.save_checkpoint(Path(sys.argv[1]), "a")
train(engine, token_batches(1))
pace = Pace(pytest.MonkeyPatch())
def stay():
    if len(pace.saved) == 3:
        print("held", flush=True)
        threading.Event().wait()
pace.on_hold = stay
engine.save_checkpoint(Path(sys.argv[1]), sys.argv[2], background=True)
train(engine, token_batches(1))
engine.saving.wait()
"""


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_process_that_is_killed(tmp_path: Path, tag: str) -> None:
    """The previous checkpoint stays complete, and the next save removes the leftovers."""
    process = python(HELD, str(tmp_path), tag, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
    finally:
        process.kill()
        process.communicate()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a", "latest", f".{tag}.partial-{process.pid}"}
    with engine_of() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        engine.save_checkpoint(tmp_path, tag, background=True)
    assert {path.name for path in tmp_path.iterdir()} == {"a", tag, "latest"}


def test_control_c_while_closing_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """close() waits for the save; Ctrl-C stops the save, closes the engine and keeps the previous checkpoint."""
    threads = set(threading.enumerate())
    pace = Pace(monkeypatch)
    engine = engine_of()
    train(engine, BATCHES[:2])
    engine.save_checkpoint(tmp_path, "a")
    stop, close = Saving.stop, Saver._close

    def interrupted(saver: Saver) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("not interrupted")

    def free_once_stopped(saving: Saving) -> None:
        stop(saving)
        threading.Timer(0.2, pace.free).start()

    def closed_after_the_thread(saver: Saver, then: Callable[[], None]) -> None:
        assert saver._thread is not None and not saver._thread.is_alive(), "the thread still reads what is closed"
        close(saver, then)

    engine.save_checkpoint(tmp_path, "b", background=True)
    assert pace.held.wait(20)
    monkeypatch.setattr(Saver, "join", interrupted)
    monkeypatch.setattr(Saving, "stop", free_once_stopped)
    monkeypatch.setattr(Saver, "_close", closed_after_the_thread)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert {thread.name for thread in threading.enumerate() if thread not in threads} == set()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest"}
    assert (tmp_path / "latest").read_text() == "a"


def test_control_c_right_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that has started continues after Ctrl-C."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "infinity-save":
            os.kill(os.getpid(), signal.SIGINT)

    with engine_of() as engine:
        train(engine, BATCHES[:2])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(tmp_path, "a", background=True)
        losses = train(engine, BATCHES[2:])
        assert engine.saving is not None and engine.saving.wait() == tmp_path / "a"
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[2:]) == losses


# -- when it fails -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    unmount = mount("-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder))
    yield folder
    unmount()


def fail_at_wait(engine: TrainingEngine) -> None:
    assert engine.saving is not None
    engine.saving.wait()


def fail_at_step(engine: TrainingEngine) -> None:
    """Raise the error in step(), after its update."""
    assert engine.saving is not None
    while not engine.saving.done():
        time.sleep(0.01)
    train(engine, BATCHES[2:3])


def fail_at_save(engine: TrainingEngine) -> None:
    engine.save_checkpoint(Path("/nowhere"))


def fail_at_close(engine: TrainingEngine) -> None:
    engine.close()


@pytest.mark.parametrize("where", [fail_at_wait, fail_at_step, fail_at_save, fail_at_close])
def test_a_full_disk(small_disk: Path, where: Callable[[TrainingEngine], None]) -> None:
    """The first call that can raises the error, once. The previous checkpoint and training are unchanged."""
    with engine_of() as engine:
        losses = train(engine, BATCHES)
        expected = states_of(engine)
    engine = engine_of()
    assert train(engine, BATCHES[:2]) == losses[:2]
    engine.save_checkpoint(small_disk, "a")
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(bytes(free - 200_000))
    path = engine.save_checkpoint(small_disk, "b", background=True)
    assert path == small_disk / "b"
    said = r"the checkpoint .*/b could not be written in the background: .*No space left"
    with pytest.raises(CheckpointError, match=said) as caught:
        where(engine)
    assert isinstance(caught.value.__cause__, OSError)
    assert {entry.name for entry in small_disk.iterdir()} == {"a", "latest", "filler"}
    assert (small_disk / "latest").read_text() == "a"
    if where is not fail_at_close:
        done = engine.global_steps
        assert done == (3 if where is fail_at_step else 2)
        assert train(engine, BATCHES[done:]) == losses[done:]
        assert all(torch.equal(value, expected[name]) for name, value in states_of(engine).items())
        (small_disk / "filler").unlink()
        engine.load_checkpoint(small_disk)
        assert engine.global_steps == 2
        engine.save_checkpoint(small_disk, "b", background=True)
    engine.close()


def test_a_failure_nobody_was_told_of_is_logged(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    (small_disk / "filler").write_bytes(bytes(1_300_000))
    for end in (end_by_dropping, end_by_an_error):
        box = [engine_of()]
        box[0].save_checkpoint(small_disk, "b", background=True)
        caplog.clear()
        end(box)
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(said) == 1 and "b could not be written in the background" in said[0]
    assert {entry.name for entry in small_disk.iterdir()} == {"filler"}


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_that_takes_no_files(tmp_path: Path, background: bool) -> None:
    """save_checkpoint raises at once."""
    with engine_of() as engine:
        losses = train(engine, BATCHES[:1])
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=r"could not be written: .*Not a directory"):
            engine.save_checkpoint(tmp_path / "file", "a", background=background)
        assert engine.saving is None
        assert train(engine, BATCHES[1:2]) and losses


# -- what it holds -----------------------------------------------------------------------------------------------------


def reach(start: object) -> list[object]:
    """Return all objects that `start` references, directly or not: closures of functions, but not their modules."""
    found: dict[int, object] = {}
    todo = [start]
    while todo:
        thing = todo.pop()
        if id(thing) in found or isinstance(thing, (type, types.ModuleType)):
            continue
        found[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            todo += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            todo += gc.get_referents(thing)
    return list(found.values())


def test_it_refers_to_neither_model_nor_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = Saver.start

    def noting(saver: Saver, saving: Saving, work: Callable[[Saving], None]) -> None:
        started.append(work)
        start(saver, saving, work)

    monkeypatch.setattr(Saver, "start", noting)
    with engine_of() as engine:
        engine.save_checkpoint(tmp_path, background=True)
        reached = reach(started)
        assert any(isinstance(thing, UnitStates) for thing in reached)
        assert not [thing for thing in reached if isinstance(thing, (nn.Module, nn.Parameter, Unit, TrainingEngine))]

"""Each stage of a commit waits for the one before, and the engine waits for a commit where it needs its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from durable.conversion_cases import assert_same, everything, opened, train
from infinity.checkpoint.format import Progress
from infinity.durable.commits import Commits, Committing, Step
from infinity.durable.record import Record
from infinity.engine import training
from infinity.engine.training import TrainingEngine
from infinity.errors import RanksError, StorageError, UsageError
from infinity.plan.placement import Extent
from infinity.tiers.durable import DurableTier
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import DONE, Transfer
from infinity.update.job import UpdateProgress
from support.held_commits import HeldCommits
from support.late_disk import LateTransfer


class Pending:
    """A transfer that ends when it is waited for."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def done(self) -> bool:
        return self.waited


def step_of(*jobs: Any, written: Any = None) -> Step:
    progress = Progress(1, 0, [], None, None)
    return Step(jobs, {0}, written or {}, progress, [[1]], lambda: {})


def job(done: Any = None, *, has_begun: bool = True) -> Any:
    return SimpleNamespace(done=done or Pending(), began=SimpleNamespace(done=lambda: has_begun))


class Parts:
    """A `Commits` of one unit in host memory and one rank, without files. `log` has the calls in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.update, self.write = Pending(), Pending()
        self.run: Any = SimpleNamespace(
            record=None,
            path=Path("run"),
            next_number=lambda: 1,
            check_held=lambda: None,
            write=self._write,
            conclude=self._note("conclude"),
        )
        tier: Any = SimpleNamespace(
            write=lambda extent, memory: self.write,
            seal=self._seal,
            sync=self._note("sync"),
            checksums=b"",
            digests=lambda *_: None,
            check_named=lambda: None,
            slots=SimpleNamespace(commit=self._note("commit")),
        )
        memory: Any = {"host": SimpleNamespace(writes={}, memory=lambda extent: torch.zeros(1))}
        extents: Any = [SimpleNamespace(unit=0, working=SimpleNamespace(tier="host", offset=0), first=None)]
        channel: Any = SimpleNamespace(is_single=True, sum=lambda value: value, close=self._note("close"))
        device: Any = SimpleNamespace(enter_thread=lambda: None)
        self.commits = Commits(self.run, tier, memory, extents, channel, device, lambda: False)

    def _note(self, what: str) -> Callable[..., None]:
        return lambda *_: self.log.append(what)

    def _seal(self) -> bytes:
        self.log.append(f"seal, updated {self.update.waited}, written {self.write.waited}")
        return b""

    def _write(self, record: Any, _: Any) -> None:
        self.run.record = record
        self.log.append("record")


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.commits.close()


def test_a_step_is_sealed_once_its_updates_and_its_writes_have_ended(parts: Parts) -> None:
    parts.commits._commit(step_of(job(parts.update)))
    assert parts.log == ["seal, updated True, written True", "sync", "record", "commit", "conclude"]


def test_a_step_counts_as_committed_once_all_ranks_have_their_record(parts: Parts) -> None:
    """A rank that is lost meanwhile may not have its own: a restart would resume from the step before."""
    before = parts.run.record = Record(6, Progress(6, 0, [], None, None), [[1]], b"", {})

    def lost(value: float) -> float:
        assert parts.run.record is not before  # this rank has its record
        raise RanksError("rank 1 is gone")

    parts.commits._channel.sum = lost  # type: ignore[method-assign]
    commit = parts.commits.start(step_of(job(parts.update)))
    with pytest.raises(StorageError, match=r"rank 1 is gone\. The last committed step is 6, "):
        commit.wait()
    assert parts.run.record is not before, "its record stays: the others may all have theirs"


def test_a_commit_is_done_at_its_end_only() -> None:
    committing = Committing(step_of())
    assert not committing.done()
    committing.keep()
    assert committing.done()


def test_waiting_for_a_commit_waits_until_it_is_kept() -> None:
    committing, promise = Committing(step_of(job())), Pending()
    committing._promise = promise  # type: ignore[assignment]
    committing.wait()
    assert promise.waited


def test_a_wait_that_would_never_end_is_refused() -> None:
    """It needs an update that has not begun, which the waiting thread would begin later."""
    committing = Committing(step_of(job(has_begun=False)))
    committing._promise = Pending()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="after_backward"):
        committing.wait()


def test_abandoning_fails_the_updates_that_have_not_begun() -> None:
    """The thread waits for them, and nobody would begin them."""
    waiting, begun = UpdateProgress(), UpdateProgress()
    begun.began.keep()
    Committing(Step([waiting, begun], (), {}, Progress(0, 0, [], None, None), [], dict)).abandon()
    with pytest.raises(StorageError, match="closed before the update"):
        waiting.done.wait()
    assert not begun.done.done()


def test_waiting_raises_the_error_of_the_last_commit(parts: Parts) -> None:
    parts.commits._last = Committing(step_of())
    parts.commits._last.fail(StorageError("the drive is gone"))
    with pytest.raises(StorageError, match="the drive is gone"):
        parts.commits.wait()


def test_closing_ends_the_commit_under_way_before_its_channel(parts: Parts) -> None:
    """The commit goes on once its thread is joined."""

    joined = threading.Event()
    commits = parts.commits
    commits.start(step_of(job(SimpleNamespace(wait=lambda: joined.wait(20)))))
    thread = commits._thread
    assert thread is not None

    def join() -> None:
        joined.set()
        thread.join()

    commits._thread = SimpleNamespace(join=join)  # type: ignore[assignment]
    try:
        commits.close()
        assert parts.log[-2:] == ["conclude", "close"]
    finally:
        join()


# -- the engine --------------------------------------------------------------------------------------------------------


def is_committed(engine: TrainingEngine) -> bool:
    durable = engine.updates.durable
    assert durable is not None and durable._commits._last is not None
    return durable._commits._last.done()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCommits]:
    made = HeldCommits(monkeypatch)
    yield made
    assert not made.overdue


def test_a_step_waits_for_the_commit_before(held: HeldCommits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits are written to slots after it."""
    with opened(str(tmp_path), 1, update="next_forward") as engine:
        train(engine, range(1))
        seen: list[bool] = []
        edits = engine.parts.runner.edits
        write = edits.write
        monkeypatch.setattr(edits, "write", lambda: (seen.append(is_committed(engine)), write()))
        train(engine, range(1, 2))
        assert seen == [True]


def test_a_save_waits_for_the_commit_of_its_step(held: HeldCommits, tmp_path: Path) -> None:
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(2))
        path = engine.save_checkpoint(tmp_path / "saved")
        assert is_committed(engine) and (path / "states-00000.bin").exists()


def test_a_load_waits_for_the_commit_under_way(held: HeldCommits, tmp_path: Path) -> None:
    """Its own run has no commit before the first one has ended."""
    with opened(str(tmp_path), 1) as engine:
        train(engine, range(1))
        expected = everything(engine)
        engine.load_checkpoint(engine.updates.durable.run.path)  # type: ignore[union-attr]
        assert_same(everything(engine), expected)
        held.free()


def test_a_loaded_checkpoint_is_committed_when_the_load_returns(held: HeldCommits, tmp_path: Path) -> None:
    with opened(str(tmp_path), 1, durable=False) as engine:
        train(engine, range(1))
        engine.save_checkpoint(tmp_path / "saved")
    with opened(str(tmp_path), 1) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert is_committed(engine)


def test_states_are_offloaded_once_they_are_committed(
    held: HeldCommits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit writes states of the device through."""
    seen: list[bool] = []
    offload = training.offload
    with opened(str(tmp_path), 1, device="none") as engine:
        monkeypatch.setattr(training, "offload", lambda parts: (seen.append(is_committed(engine)), offload(parts)))
        train(engine, range(1))
        engine.offload_states()
        assert seen == [True]
        engine.reload_states()


def test_closing_raises_the_error_of_the_last_commit(
    held: HeldCommits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(str(tmp_path), 1)
    train(engine, range(1))

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(engine.updates.durable.run), "write", failing)  # type: ignore[union-attr]
    with pytest.raises(StorageError, match="step 1 could not be committed"):
        engine.close()


def test_a_commit_writes_what_was_updated_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States in memory that a step leaves alone are in their slots already."""
    steps: list[Step] = []
    start = Commits.start
    monkeypatch.setattr(Commits, "start", lambda commits, step: (steps.append(step), start(commits, step))[1])
    with opened(str(tmp_path), 1, device="cpu") as engine:
        durable = engine.updates.durable
        assert durable is not None
        train(engine, range(1))
        durable.commit(engine._progress(), engine.module, {})
        trained = {unit.index for unit in engine.units if unit.layout.trainable}
        assert [step.updated for step in steps] == [trained, set()]


def test_a_copy_of_committed_slots_is_waited_for_by_one_commit(tmp_path: Path) -> None:
    """The commit after it; the slots of the next ones are not those that it copies."""
    asked: list[int] = []

    def keep(unit: int) -> Transfer:
        asked.append(unit)
        return DONE

    with opened(str(tmp_path), 1) as engine:
        durable = engine.updates.durable
        assert durable is not None
        train(engine, range(1))
        durable._kept.append(keep)
        train(engine, range(1, 3))
        assert asked == [unit.index for unit in engine.units]


def test_states_in_memory_have_been_read_when_a_resume_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a drive whose reads arrive as late as they may."""
    with opened(str(tmp_path), 1, device="cpu") as engine:
        train(engine, range(1))
        expected = everything(engine)
    read = DurableTier.read

    def late(tier: DurableTier, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        content = host_tensor(destination.numel())
        read(tier, extent, content, offset).wait()
        destination.fill_(0xFF)
        return LateTransfer(lambda: destination.copy_(content))

    monkeypatch.setattr(DurableTier, "read", late)
    with opened(str(tmp_path), 1, seed=9, device="cpu") as engine:
        engine.resume()
        assert_same(everything(engine), expected)

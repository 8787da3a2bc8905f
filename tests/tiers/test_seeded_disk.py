"""Training is the same in whatever order the disk carries transfers out, if the engine waits where it must.

Mutations that these tests caught (`make mutants` removes all waits):

- `UpdatingUnits.place` without `PlacedUpdate.after`: an update reads states that the one before has yet to write.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from infinity.engine.training import TrainingEngine
from infinity.update.job import PlacedUpdate, UpdateProgress
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_same, open_engine, parameters_of, train, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches
from support.seeded_disk import Schedule, use_seeded_disks

TOKENS = token_batches(6)
SEEDS = range(4)


def test_the_order_is_the_seeds() -> None:
    """The seeded disk lets transfers overtake one another, equally many in every run of a seed."""
    overtaken = []
    for seed in (0, 0, 1):
        schedule, done = Schedule(seed), list[int]()
        transfers = [schedule.issue(partial(done.append, number), write=True) for number in range(20)]
        transfers[3].wait()
        assert 3 in done
        schedule.end()
        assert sorted(done) == list(range(20)) != done
        overtaken.append((schedule.out_of_order, done))
    assert overtaken[0] == overtaken[1] != overtaken[2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("clip, accumulation", [(0.0, 1), (0.5, 2)])
def test_trains_alike_in_every_order(
    monkeypatch: pytest.MonkeyPatch, clip: float, accumulation: int, late: bool, seed: int
) -> None:
    config = engine_config(bf16=True, clip=clip, accumulation=accumulation, prefetch_bytes=20_000)
    expected = trained(seeded(Stack), TOKENS, config)
    schedule = Schedule(seed)
    use_seeded_disks(monkeypatch, schedule)
    assert_same(trained(seeded(Stack), TOKENS, config, LateDevice() if late else None), expected)
    assert schedule.out_of_order > 20


class Pressing:
    """Delays each update's writes until the next update is submitted."""

    def __init__(self) -> None:
        self.pressed = 0
        """Number of updates submitted before the former one was written."""
        self._updates: list[UpdateProgress] = []
        self._ended = False
        self._submitted = threading.Condition()

    def watch(self, engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        submit = engine.updates.pipeline.submit

        def watched(placed: PlacedUpdate) -> None:
            with self._submitted:
                submit(placed)
                self.pressed += bool(self._updates) and not self._updates[-1].done.done()
                self._updates.append(placed.job.progress)
                self._submitted.notify_all()

        monkeypatch.setattr(engine.updates.pipeline, "submit", watched)

    def hold(self) -> None:
        """Called before a write is carried out."""
        if threading.current_thread().name != "infinity-update":
            return
        with self._submitted:
            number = len(self._updates)
            if self._ended or (number > 1 and not self._updates[-2].done.done()):
                return
            assert self._submitted.wait_for(lambda: self._ended or len(self._updates) > number, timeout=60)

    def end(self) -> None:
        with self._submitted:
            self._ended = True
            self._submitted.notify_all()


def test_an_update_follows_the_writes_of_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second update of a unit is there while the first one's tiles are on their way to the disk: it must not read
    the states that they replace. An update during backward is decided after the former one's writes.
    """
    batches = vector_batches(5, width=96)
    config = engine_config(folder=tmp_path, unit_size="64MiB", update="next_forward")
    make = lambda: Linears(96, depth=1)  # noqa: E731
    expected = trained(seeded(make), batches, config)
    pressing = Pressing()
    use_seeded_disks(monkeypatch, Schedule(0, drift=0, before_write=pressing.hold))
    with open_engine(seeded(make), config) as engine:
        pressing.watch(engine, monkeypatch)
        losses = train(engine, batches)
        pressing.end()
        assert_same(Result(losses, parameters_of(engine)), expected)
    assert pressing.pressed == len(batches) - 1

"""The thread of collectives: it is given up while it waits for a lost rank, and for no other reason."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from infinity.comm import thread
from infinity.comm.thread import CollectiveThread, threads_with
from infinity.errors import RanksError

CAUSE = "rank 1 is lost: its process has ended"


@pytest.fixture
def endless() -> Iterator[threading.Event]:
    """Ends the wait of a thread that was given up, after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of `give_up` in one collective gives up."""
    monkeypatch.setattr(thread, "PATIENCE", 0.0)


def given_up(collectives: CollectiveThread) -> bool:
    collectives.give_up(CAUSE)
    collectives.give_up(CAUSE)
    return bool(collectives.error)


def test_collectives_are_executed_in_order_on_one_thread() -> None:
    began: list[str] = []
    collectives = CollectiveThread("infinity-comm", [0], lambda: began.append(threading.current_thread().name))
    assert began == ["infinity-comm"]
    done: list[int] = []
    assert [each.result() for each in [collectives.submit(done.append, number) for number in range(9)]] == [None] * 9
    assert done == list(range(9))
    with pytest.raises(ZeroDivisionError):
        collectives.submit(lambda: 1 // 0).result()
    assert collectives.submit(lambda: 2).result() == 2
    collectives.shutdown()
    with pytest.raises(RuntimeError, match="has ended"):
        collectives.submit(lambda: 3)


def test_an_initializer_that_fails_is_an_error() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        CollectiveThread("infinity-comm", [0], lambda: print(1 // 0))
    assert threading.active_count() == before


def test_a_wait_that_nothing_ends_is_given_up(endless: threading.Event) -> None:
    """Its future and those of later collectives raise the cause; closing does not wait."""
    collectives = CollectiveThread("infinity-comm", [0, 1])
    waiting, after = collectives.submit(endless.wait), collectives.submit(lambda: 1)
    assert given_up(collectives)
    for each in (waiting, after, collectives.submit(lambda: 2)):
        with pytest.raises(RanksError, match=f"^{CAUSE}. Fix the error and restart all ranks.$"):
            each.result()
    collectives.shutdown()
    endless.set()
    collectives._thread.join()  # executes nothing more
    with pytest.raises(RanksError):
        after.result()


def test_threads_are_found_by_the_ranks_of_their_collectives() -> None:
    collectives = CollectiveThread("infinity-comm", [70, 72])
    assert [each() for each in threads_with(72)] == [collectives]
    assert threads_with(71) == []
    collectives.shutdown()


def test_work_that_is_given_up_is_released(endless: threading.Event) -> None:
    class Buffer:
        def use(self) -> None:
            raise AssertionError

    collectives = CollectiveThread("infinity-comm", [0, 1])
    collectives.submit(endless.wait)
    buffer = Buffer()
    alive = weakref.ref(buffer)
    collectives.submit(buffer.use)
    assert given_up(collectives)
    del buffer
    assert alive() is None
    collectives.shutdown()


def test_an_idle_thread_and_one_that_proceeds_are_not_given_up() -> None:
    collectives = CollectiveThread("infinity-comm", [0, 1])
    assert not given_up(collectives)
    waits = [threading.Event() for _ in range(3)]
    futures = [collectives.submit(each.wait) for each in waits]
    for wait, future in zip(waits, futures, strict=True):
        collectives.give_up(CAUSE)
        wait.set()
        assert future.result()
    collectives.shutdown()
    assert not collectives.error


def test_a_collective_has_its_time(monkeypatch: pytest.MonkeyPatch, endless: threading.Event) -> None:
    monkeypatch.setattr(thread, "PATIENCE", 1e9)
    collectives = CollectiveThread("infinity-comm", [0, 1])
    waiting = collectives.submit(endless.wait)
    assert not given_up(collectives)
    endless.set()
    assert waiting.result()
    collectives.shutdown()


def test_the_thread_ends_with_its_owner() -> None:
    collectives = CollectiveThread("infinity-comm", [0])
    running, owner = collectives._thread, weakref.ref(collectives)
    del collectives
    gc.collect()
    assert owner() is None
    running.join(5)
    assert not running.is_alive()


def test_work_and_its_arguments_are_released() -> None:
    """An idle thread keeps neither a buffer nor an error's frames."""

    class Buffer:
        def fail(self) -> None:
            raise ValueError

    collectives = CollectiveThread("infinity-comm", [0])
    buffer = Buffer()
    alive = weakref.ref(buffer)
    failed = collectives.submit(buffer.fail)
    assert isinstance(failed.exception(), ValueError)
    del buffer, failed
    collectives.submit(lambda: None).result()
    gc.collect()
    assert alive() is None
    collectives.shutdown()


def test_a_collected_owner_may_close_it_in_its_own_thread() -> None:
    collectives = CollectiveThread("infinity-comm", [0])
    collectives.submit(collectives.shutdown).result(5)
    collectives._thread.join(5)
    assert not collectives._thread.is_alive()


PROGRAM = """
import os, threading, time
from infinity.comm import thread
thread.PATIENCE = 0.0
collectives = thread.CollectiveThread("infinity-comm", [0, 1])
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("collectives.submit(lambda: (time.sleep(0.5), print('exchanged')))", "exchanged\n"),
        (
            "collectives.submit(threading.Event().wait)\n"
            "for _ in range(2): collectives.give_up('lost')\n"
            "print(collectives.error)",
            "lost. Fix the error and restart all ranks.\n",
        ),
        (
            "collectives.submit(time.sleep, 1)\n"
            "if (child := os.fork()) == 0: raise SystemExit(3)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
            "3\n",
        ),
    ],
    ids=["open", "given up", "forked"],
)
def test_the_end_of_python(program: str, printed: str) -> None:
    """It waits for what an open engine exchanges, for no thread that was given up, and in no forked child."""
    command = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, printed), done.stderr

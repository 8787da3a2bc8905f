"""Transfers made of others end when these have, and carry their errors."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from infinity.tiers.transfer import DONE, Both, Failed, Promised, run_on
from support.late_disk import LateTransfer


def late(carried_out: list[str], name: str) -> LateTransfer:
    return LateTransfer(lambda: carried_out.append(name))


def test_both_waits_for_both() -> None:
    carried_out: list[str] = []
    both = Both(late(carried_out, "one"), late(carried_out, "other"))
    assert not both.done()
    both.wait()
    assert carried_out == ["one", "other"] and both.done()


@pytest.mark.parametrize("first", [True, False])
def test_both_is_not_done_by_one(first: bool) -> None:
    pending = late([], "pending")
    assert not (Both(pending, DONE) if first else Both(DONE, pending)).done()


@pytest.mark.parametrize("first", [True, False])
def test_both_raises_the_error_of_either(first: bool) -> None:
    failed = Failed(OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        (Both(failed, DONE) if first else Both(DONE, failed)).wait()


def test_a_promise_is_done_when_it_is_kept() -> None:
    future: Future[None] = Future()
    promised = Promised(future)
    assert not promised.done()
    future.set_result(None)
    promised.wait()
    assert promised.done()


def test_a_promise_that_is_broken() -> None:
    future: Future[None] = Future()
    future.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        Promised(future).wait()


def test_work_on_a_thread_is_waited_for() -> None:
    begin, done = threading.Event(), list[str]()

    def work(name: str) -> None:
        assert begin.wait(60)
        done.append(name)

    with ThreadPoolExecutor(1) as executor:
        transfer = run_on(executor, work, "moved")
        assert not transfer.done()
        begin.set()
        transfer.wait()
        assert done == ["moved"]

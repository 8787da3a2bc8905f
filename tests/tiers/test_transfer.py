"""Composed transfers end when all their parts have, and carry the parts' errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from infinity.tiers.transfer import Promise, Promised, Transfer, issued, run_on
from support.late_disk import LateTransfer


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


def kept(rest: Transfer) -> Promise:
    promise = Promise()
    promise.keep(rest)
    return promise


def promised(rest: Transfer) -> Promised:
    future: Future[Transfer] = Future()
    future.set_result(rest)
    return Promised(future)


@pytest.mark.parametrize("make", [kept, promised])
def test_a_transfer_that_a_stream_continues(make: Callable[[Transfer], Transfer]) -> None:
    """The thread's part has ended, the stream's has not."""
    rest = LateTransfer(lambda: None)
    transfer = make(rest)
    assert issued(transfer) is rest
    assert not transfer.done()
    transfer.wait()
    assert rest.done() and transfer.done()

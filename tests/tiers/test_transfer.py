"""Composed transfers end when all their parts have, and carry the parts' errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from infinity.tiers.transfer import Promise, Promised, Together, Transfer, also, issued, run_on
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


class Noted:
    """A transfer that notes waits for it."""

    def __init__(self, *, done: bool = True, error: Exception | None = None) -> None:
        self.waits = 0
        self._done = done
        self._error = error

    def wait(self) -> None:
        self.waits += 1
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._done


def test_several_transfers_are_all_waited_for() -> None:
    """Also those after one that failed, since their buffers are released next."""
    parts = [Noted(), Noted(error=OSError(5, "first")), Noted(error=OSError(5, "second")), Noted()]
    with pytest.raises(OSError, match="first"):
        Together(*parts).wait()
    assert [part.waits for part in parts] == [1, 1, 1, 1]


def test_several_transfers_are_done_when_all_are() -> None:
    assert Together(Noted(), Noted()).done()
    assert not Together(Noted(), Noted(done=False)).done()
    assert not Together(Noted(done=False), Noted()).done()


def test_a_gate_that_has_ended_leaves_the_next_one() -> None:
    more = Noted(done=False)
    assert also(Noted(), more) is more


def test_a_gate_that_has_failed_stays() -> None:
    both = also(Noted(error=OSError(5, "lost")), Noted())
    with pytest.raises(OSError, match="lost"):
        both.wait()


def test_a_gate_under_way_is_not_waited_for_when_one_is_added() -> None:
    before, more = Noted(done=False), Noted()
    both = also(before, more)
    assert before.waits == 0 and not both.done()
    both.wait()
    assert before.waits == more.waits == 1

"""Ctrl-C waits for the end of a section that must not be cut."""

from __future__ import annotations

import signal
import threading

import pytest

from infinity.interrupts import ForcedInterrupt, uninterrupted


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_put_off_to_the_end() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        interrupt()
        done = True
    assert done
    assert caught.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_put_off_to_the_end_of_the_outermost() -> None:
    done = []

    @uninterrupted()
    def inner() -> None:
        interrupt()
        done.append("inner")

    with pytest.raises(KeyboardInterrupt), uninterrupted():
        inner()
        done.append("outer")
    assert done == ["inner", "outer"]


def test_the_second_does_not_wait() -> None:
    with pytest.raises(ForcedInterrupt), uninterrupted():
        interrupt()
        interrupt()
        pytest.fail("went on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        interrupt()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_without_an_interrupt() -> None:
    with pytest.raises(ValueError), uninterrupted():
        raise ValueError
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_handlers_of_others() -> None:
    """A user's handler is called at the end; where SIGINT is ignored it stays ignored."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            interrupt()
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_nothing() -> None:
    results = []

    def work() -> None:
        with uninterrupted():
            results.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [signal.default_int_handler]

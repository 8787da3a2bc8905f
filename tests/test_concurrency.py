"""Threads of the engine."""

from __future__ import annotations

import threading
from concurrent.futures.thread import BrokenThreadPool

import pytest

from infinity.concurrency import one_thread


def test_an_executor_starts_its_thread_at_once() -> None:
    """A thread that cannot start is an error of the constructor, not of the first work, which would be kept forever."""
    began = []
    executor = one_thread("named", lambda: began.append(threading.current_thread().name))
    assert began == ["named_0"]
    assert executor.submit(threading.get_ident).result() != threading.get_ident()
    executor.shutdown()


def test_an_initializer_that_fails_is_an_error() -> None:
    def fail() -> None:
        raise ValueError("no device")

    before = threading.active_count()
    with pytest.raises(BrokenThreadPool):
        one_thread("named", fail)
    for thread in threading.enumerate():
        if thread.name.startswith("named"):
            thread.join()
    assert threading.active_count() == before

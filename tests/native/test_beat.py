"""Signs of life are sent on time, without the GIL, and never block."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infinity.native import _heartbeat


@contextmanager
def beating(period: float, *sockets: socket.socket) -> Iterator[None]:
    stop, stopped = os.pipe()
    numbers = [each.fileno() for each in sockets]
    thread = threading.Thread(target=_heartbeat.beat, args=(numbers, period, stop))
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join(20)
        os.close(stop)
        assert not thread.is_alive()


def test_bytes_arrive_while_the_gil_is_held() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with beating(0.01, ours):
            theirs.recv(1)
            theirs.setblocking(False)
            ctypes.PyDLL(None).usleep(300_000)
            received = theirs.recv(1000)
        assert received == b"\n" * len(received) and len(received) > 3


def test_a_socket_that_nobody_reads_does_not_delay_others() -> None:
    full, unread = socket.socketpair()
    ours, theirs = socket.socketpair()
    with full, unread, ours, theirs:
        full.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                full.send(bytes(1 << 16))
        theirs.settimeout(20)
        with beating(0.01, full, ours):
            assert [theirs.recv(1) for _ in range(3)] == [b"\n"] * 3


def test_a_socket_whose_other_end_is_closed_is_ignored() -> None:
    gone, closed = socket.socketpair()
    ours, theirs = socket.socketpair()
    closed.close()
    with gone, ours, theirs:
        theirs.settimeout(20)
        with beating(0.01, gone, ours):
            assert theirs.recv(1) == b"\n"


def test_it_ends_before_the_period_does() -> None:
    began = time.monotonic()
    with beating(3600.0):
        pass
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("period", [0.0, -1.0, 3601.0, float("nan")])
def test_periods_that_are_refused(period: float) -> None:
    with pytest.raises(ValueError, match="period must be above 0 and at most 3600"):
        _heartbeat.beat([], period, 0)

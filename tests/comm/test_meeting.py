"""The connections of a heartbeat: who is let in, and how bytes become messages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from infinity.comm.liveness import meeting
from infinity.comm.liveness.heartbeat import _Watch
from infinity.comm.liveness.meeting import Link
from infinity.comm.liveness.processes import Process

TOKEN = "0123456789abcdef"


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours), theirs


def test_lines_that_arrive_in_parts(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    with pytest.raises(BlockingIOError):
        link.receive()
    other.sendall(b"\n\n[1, ")
    assert link.receive() == [b"", b""]
    other.sendall(b"2]\n\n[3")
    assert link.receive() == [b"[1, 2]", b""]
    other.close()
    assert link.receive() is None


def test_a_message_to_a_rank_that_left_is_dropped(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    other.close()
    link.send(b"[]\n")
    link.finish()


def test_only_ranks_with_the_token_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers and impossible numbers are turned away, and the first message of a rank stays."""
    monkeypatch.setattr(meeting, "_CONNECT", 20.0)
    opened = []

    def connect() -> None:
        for greeting in (
            f"{'0' * 16} 1",
            f"{TOKEN} 0",
            f"{TOKEN} 3",
            f"{TOKEN} one",
            "",
            "x" * 100,
            f"{TOKEN} 2",
            f"{TOKEN} 1",
        ):
            opened.append(connection := socket.create_connection(listener.getsockname()))
            connection.sendall(f"{greeting}\nfirst\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=connect)
        thread.start()
        links = meeting._accept(listener, TOKEN, 3)
        thread.join()
    assert list(links) == [1, 2]
    assert [link.receive() for link in links.values()] == [[b"first"], [b"first"]]
    for each in (*links.values(), *opened):
        each.close()


def test_ranks_that_do_not_come_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_CONNECT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert meeting._accept(listener, TOKEN, 2) == {}


@pytest.mark.parametrize(("timeout", "lost"), [(0.0, []), (30.0, [1])])
def test_silence(pair: tuple[Link, socket.socket], timeout: float, lost: list[int]) -> None:
    """A timeout of 0 is none. A rank is lost once."""
    found: list[int] = []
    watch = _Watch([Process.own(0), Process.own(1)], 0, {1: pair[0]}, timeout, found.append)
    for _ in range(100):
        watch._count_silence(1.0)
    assert found == lost
    assert watch.cause().count("has not responded for 30 s") == len(lost)
    for descriptor in (watch._stop, watch._stopped):
        os.close(descriptor)

"""Connects all ranks of a group to its first one, over the network that the group uses."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import closing, suppress
from typing import Any, TypeAlias

import torch.distributed as dist

from infinity.comm.connections import addresses_of
from infinity.comm.groups import gather_objects
from infinity.comm.liveness.processes import Process
from infinity.observe.log import logger

_CONNECT = 10.0
"""Seconds in which all ranks of a group, which are there, connect to the first."""
_TOKEN_BYTES = 16
_LONGEST_GREETING = 64
_RECEIVED = 1 << 16


class Link:
    """A connection to another rank, on which messages are lines."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            # Heartbeats and reports are small: without it, TCP would hold them back to join them.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._begun = b""
        """Beginning of a line whose end has not arrived."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, line: bytes) -> None:
        """Send a line, which ends with a newline, if the connection is open. Never blocks."""
        # A full or closed connection drops the line: the sender must not wait for a rank that hangs.
        with suppress(OSError):
            self._connection.send(line)

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived, without newlines; None if the other rank has closed its end. Raises
        BlockingIOError if nothing has arrived, and OSError if the connection failed.
        """
        received = self._connection.recv(_RECEIVED)
        # A heartbeat is an empty line, so that each received byte ends the silence.
        if not received:
            return None
        *lines, self._begun = (self._begun + received).split(b"\n")
        return lines

    def finish(self) -> None:
        """Let the other rank receive all that was sent: bytes that stay unread here would reset the connection."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(_RECEIVED):
                pass

    def close(self) -> None:
        self._connection.close()


_Meeting: TypeAlias = tuple[int, tuple[Any, ...], str]
"""Where the first rank waits for the others: family and address of its socket, and a token that only ranks have."""


def meet(group: dist.ProcessGroup, rank: int, size: int) -> tuple[list[Process], dict[int, Link]]:
    """Return the processes of all ranks, and the connections: to all others on rank 0, to rank 0 on the others.

    Collective on `group`, a gloo group. A rank that cannot connect has none, and a warning says so.
    """
    listener = _listen(group) if rank == 0 else None
    token = secrets.token_hex(_TOKEN_BYTES)
    meeting = None if listener is None else (listener.family, listener.getsockname(), token)
    own = Process.own(dist.get_rank())
    try:
        found = gather_objects((own, meeting), group)
        processes = [process for process, _ in found]
        if rank:
            link = _connect(found[0][1], rank)
            links = {} if link is None else {0: link}
        else:
            links = {} if listener is None else _accept(listener, token, size)
    finally:
        if listener is not None:
            listener.close()
    missing = "" if rank else ", ".join(processes[other].name for other in range(1, size) if other not in links)
    if missing:
        logger.warning("no heartbeat with %s: if one hangs, only the process group's timeout ends the wait", missing)
    return processes, links


def _listen(group: dist.ProcessGroup) -> socket.socket | None:
    """Return a socket at this rank's address in `group`."""
    for family, (host, _, *scope) in addresses_of(group):
        with suppress(OSError):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((host, 0, *scope))
                listener.listen(socket.SOMAXCONN)
            except OSError:
                listener.close()
                raise
            return listener
    return None


def _accept(listener: socket.socket, token: str, size: int) -> dict[int, Link]:
    """Return the connections of the ranks from 1, as far as they arrive in time."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + _CONNECT
    while len(links) < size - 1 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError, ValueError):
            # Anybody who reaches the port may connect; only the ranks have the token.
            connection, _ = listener.accept()
            with closing(connection):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                given, number = _greeting(connection).split()
                # In a time that does not depend on the number of right characters.
                if secrets.compare_digest(given, token) and 0 < int(number) < size:
                    # A duplicate outlives `closing`, which closes what others opened.
                    links[int(number)] = Link(connection.dup())
    return dict(sorted(links.items()))


def _greeting(connection: socket.socket) -> str:
    """Return the first line. Takes no byte of the second."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_GREETING:
        # One at a time: the next bytes are heartbeats, which the link reads.
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line.decode("ascii", errors="replace")


def _connect(meeting: _Meeting | None, rank: int) -> Link | None:
    if meeting is None:
        return None
    family, address, token = meeting
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT)
        connection.connect(address)
        connection.sendall(f"{token} {rank}\n".encode())
    except OSError as error:
        connection.close()
        logger.warning("no heartbeat: rank 0 cannot be reached at %s (%s)", address[:2], error)
        return None
    return Link(connection)

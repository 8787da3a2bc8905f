"""Connections of gloo groups: the sockets that a group opened, by which waits in its collectives can be ended.

gloo has no other way: `abort` and `shutdown` of its groups leave a blocked wait blocked (torch 2.13).
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_Sockets = set[tuple[int, int]]
"""(descriptor, inode) of each."""

_opened: dict[dist.ProcessGroup, _Sockets] = {}
"""Sockets of the engine's own gloo groups."""


def note(group: dist.ProcessGroup, before: _Sockets) -> None:
    """Attribute the sockets to `group` that were opened since `before`, a result of `open_sockets`."""
    # gloo connects while a group is constructed, so the difference has its sockets.
    _opened[group] = open_sockets() - before


def forget(group: dist.ProcessGroup) -> None:
    """Forget the sockets of a group that is destroyed."""
    _opened.pop(group, None)


def addresses_of(group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Return the (family, address) of this rank's ends of the connections of `group`."""
    return [(each.family, each.getsockname()) for each in _connected(_opened.get(group, set()))]


def disconnect(rank: int) -> None:
    """Close the connections of the engine's own groups that contain `rank` of the whole job.

    Their collectives, which wait for that rank, fail, in progress or later. Callable from any thread.
    """
    # A copy: other threads make and destroy groups.
    for group, sockets in list(_opened.items()):
        with suppress(RuntimeError, ValueError, KeyError):  # destroyed meanwhile
            if rank not in dist.get_process_group_ranks(group):
                continue
            for each in _connected(sockets):
                with suppress(OSError):
                    # Not `close`: the descriptor is gloo's, and its number could be given to another file at once.
                    each.shutdown(socket.SHUT_RDWR)


def _connected(sockets: _Sockets) -> Iterator[socket.socket]:
    """Yield those that are still open and connected, as duplicates that are closed at the end of each turn."""
    for descriptor, inode in sorted(sockets):
        with suppress(OSError):
            # gloo has closed it, and its number names something else by now.
            if os.fstat(descriptor).st_ino != inode:
                continue
            # A duplicate: the object closes its descriptor, which must stay gloo's.
            with socket.socket(fileno=os.dup(descriptor)) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                    yield each


def open_sockets() -> _Sockets:
    """Return the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as the listing's own
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found

"""The heartbeats of an engine's ranks: data-parallel ones, and the tensor-parallel ones of a replica.

A rank that leaves because of another one sends the cause to both, so that it reaches ranks that have neither in common
with the first.
"""

from __future__ import annotations

import torch.distributed as dist

from infinity.comm.connections import disconnect
from infinity.comm.dtensor import TensorParallelMesh
from infinity.comm.groups import connecting, destroy_group
from infinity.comm.liveness.heartbeat import Heartbeat


class Heartbeats:
    """Heartbeats of the `size` data-parallel ranks of `group`, a gloo group, and after `connect` of a replica's ranks.

    Constructed on all data-parallel ranks at once. timeout: seconds of silence after which a rank is lost; 0: never.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._replica: dist.ProcessGroup | None = None
        self._each = [self._between(group, rank, size)]

    def _between(self, group: dist.ProcessGroup, rank: int, size: int) -> Heartbeat:
        # A rank whose construction fails leaves at once, while others are still connecting to it.
        with connecting():
            dist.barrier(group)
            return Heartbeat(group, rank, size, self._timeout, disconnect)

    def connect(self, mesh: TensorParallelMesh) -> None:
        """Start the heartbeat of a replica. All its ranks call it, once."""
        self._replica = mesh.duplicate_group()
        assert self._replica is not None
        self._each.append(self._between(self._replica, mesh.number, mesh.size))
        # A rank that leaves because of one star passes the cause on in the other.
        self._each[0].relay(self._each[1])

    def cause(self) -> str:
        """Return which ranks left and why; empty if none did.

        Waits for a report that may be in transit, so call it after a collective has failed.
        """
        return next(filter(None, (each.cause() for each in self._each)), "")

    def leave(self, error: BaseException | None) -> None:
        """Report to the other ranks that this rank leaves on purpose, or because of `error`."""
        for each in self._each:
            each.leave(error)

    def close(self) -> None:
        """End the threads and the connections. Without `leave`, the other ranks report this one as lost."""
        for each in self._each:
            each.close()
        if self._replica is not None:
            destroy_group(self._replica)
            self._replica = None

"""A second channel between the ranks of an engine, for checkpoints written during training.

Training's collectives run in one order on one thread. A background save has no fixed place in that order, so it has
thread and process groups of its own. They use gloo, since only host memory is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from infinity.comm.agreement.comparison import failed_collective
from infinity.comm.communicator import Communicator
from infinity.comm.groups import destroy_group, duplicate_group, gather_objects
from infinity.comm.thread import CollectiveThread
from infinity.errors import InfinityError, RanksError

Place = tuple[slice, ...]
"""Slices of a part in the whole tensor."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _exchange(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `method` on the channel's thread; directly if there is no process group.

    Raises RanksError, with the cause if it is known, if a rank leaves without its part.
    """

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        channel = args[0]
        assert isinstance(channel, SideChannel)
        if channel._thread is None:
            return method(*args, **kwargs)
        try:
            result: _R = channel._thread.submit(method, *args, **kwargs).result()
        except InfinityError:
            raise
        except RuntimeError as error:
            raise RanksError(failed_collective(error, channel._cause())) from error
        return result

    return guarded


class SideChannel:
    """Duplicate groups of `ranks`: the data-parallel and the tensor-parallel ranks.

    Constructed on all ranks by the thread that runs the model. Exchanges run on a thread of the channel's own, for one
    caller at a time. `complete` gathers on the ranks of the first replica, `join` on the main rank, which writes;
    `gather` and `of_model` return on all their ranks.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.rank, self.shards, self.shard_rank = ranks.rank, ranks.shards, ranks.shard_rank
        self.shard = ranks.shard
        self.writes = ranks.is_main_rank
        self.is_single = ranks.replicas is None
        self._cause = ranks.cause
        self._replicas: dist.ProcessGroup | None = None
        self._model: dist.ProcessGroup | None = None
        self._thread: CollectiveThread | None = None
        self._number, self._root = ranks.model.number, 0
        """Indices of this rank and of the replica's first rank in the tensor-parallel group."""
        if ranks.replicas is not None:
            self._replicas = duplicate_group(ranks.replicas, "gloo")
            self._model = ranks.model.duplicate_group()
            groups = [group for group in (self._replicas, self._model) if group is not None]
            self._thread = CollectiveThread("infinity-side", chain(*map(dist.get_process_group_ranks, groups)))
            self.sum(0.0)  # connects all ranks
            # The first rank of a replica need not be the first one of its sorted group.
            self._root = self.of_model(ranks.model.first).index(True)

    @_exchange
    def complete(self, flat: torch.Tensor) -> None:
        """Gather the shards of `flat` (numel,), in host memory, on the first replica. The others send their shard."""
        if self._replicas is None or self.shards == 1:
            return
        if self.rank:
            dist.send(self.shard(flat), group=self._replicas, group_dst=0)
            return
        # All receives at once: ranks arrive in any order, and each writes its own chunk.
        arriving = [
            dist.irecv(shard, group=self._replicas, group_src=rank)
            for rank, shard in enumerate(flat.chunk(self.shards))
            if rank
        ]
        for transfer in arriving:
            assert transfer is not None
            transfer.wait()

    @_exchange
    def join(self, part: torch.Tensor, places: Sequence[Place], shape: tuple[int, ...]) -> torch.Tensor:
        """Gather a tensor of `shape` from its parts on the rank that writes. All ranks of the first replica call it.

        places: position of each rank's part, by rank. Returns `part` on the others.
        """
        if self._number != self._root:
            self._send(part)
            return part
        whole = torch.empty(shape, dtype=part.dtype)
        for number, place in enumerate(places):
            there = whole[place]
            there.copy_(part if number == self._root else self._receive(there, number))
        return whole

    def _send(self, part: torch.Tensor) -> None:
        if part.numel():
            # As bytes, since gloo does not send every dtype.
            dist.send(part.contiguous().view(-1).view(torch.uint8), group=self._model, group_dst=self._root)

    def _receive(self, like: torch.Tensor, number: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        if received.numel():
            dist.recv(received.view(-1).view(torch.uint8), group=self._model, group_src=number)
        return received

    @_exchange
    def sum(self, value: float) -> float:
        """Return the sum of one number over all ranks."""
        for group in (self._replicas, self._model):
            if group is not None:
                parts = torch.empty(group.size(), 1, dtype=torch.float64)
                dist.all_gather(list(parts), torch.tensor([value], dtype=torch.float64), group=group)
                value = float(parts.sum())
        return value

    @_exchange
    def agree(self, values: torch.Tensor) -> None:
        """Broadcast `values`, in host memory, from the first rank."""
        # Within the first replica, then from each of its ranks to its copies in the other replicas.
        for group, root in ((self._model, self._root), (self._replicas, 0)):
            if group is not None:
                dist.broadcast(values, group=group, group_src=root)

    @_exchange
    def gather(self, mine: Any) -> list[Any]:
        """All-gather a small object over all ranks; data-parallel ranks vary fastest."""
        found = [mine]
        if self._replicas is not None:
            found = gather_objects(mine, self._replicas)
        return [each for column in self._of_model(found) for each in column]

    @_exchange
    def of_model(self, mine: Any) -> list[Any]:
        """All-gather a small object over the ranks of this replica."""
        return self._of_model(mine)

    def _of_model(self, mine: Any) -> list[Any]:
        return [mine] if self._model is None else gather_objects(mine, self._model)

    def close(self) -> None:
        """Leave the groups. No exchange may be in progress, unless its thread was given up."""
        if self._thread is not None:
            self._thread.shutdown()
        for group in (self._replicas, self._model):
            if group is not None:
                destroy_group(group)
        self._replicas = self._model = None

"""A second way between the ranks of an engine, for what is beside training: checkpoints.

Training's collectives are in one order, on one thread. What runs at its own pace has no place in that order, and so
gets process groups of its own: over gloo, as it exchanges host memory only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity.comm.collectives import Ranks
from infinity.comm.groups import retire, twin

Place = tuple[slice, ...]
"""Where a part of a tensor is in the whole of it."""


class SideChannel:
    """The ranks of `ranks` once more: the replicas, and those that hold a model together (tensor parallelism).

    Made on all of them by the thread that runs the model, used by one thread at a time. Where they are to come together
    on one rank, it is the first of all, which writes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.shards, self.shard_rank = ranks.rank, ranks.shards, ranks.shard_rank
        self.shard = ranks.shard
        self.writes = ranks.speaks
        self._replicas: dist.ProcessGroup | None = None
        self._model: dist.ProcessGroup | None = None
        self._number, self._root = ranks.model.number, 0
        """Of the ranks that hold a model together, this one's number and that of the first one."""
        if ranks.replicas is not None:
            self._replicas = twin(ranks.replicas, "gloo")
            self._model = ranks.model.twin()
            self.sum(0.0)  # so that all are connected before anything is asked of it
            self._root = self.of_model(ranks.model.first).index(True)

    def complete(self, flat: torch.Tensor) -> None:
        """Fill `flat` (numel,), host memory whose own shard is valid, with the shards of all ranks, on the first of the
        replicas; the others give theirs.
        """
        if self._replicas is None or self.shards == 1:
            return
        if self.rank:
            dist.send(self.shard(flat), group=self._replicas, group_dst=0)
            return
        arriving = [
            dist.irecv(shard, group=self._replicas, group_src=rank)
            for rank, shard in enumerate(flat.chunk(self.shards))
            if rank
        ]
        for transfer in arriving:
            assert transfer is not None
            transfer.wait()

    def join(self, part: torch.Tensor, places: Sequence[Place], shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of which each rank that holds the model has a part, at `places` by rank; whole on the rank that
        writes. The first replica calls it.
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
            dist.send(part.contiguous().view(-1).view(torch.uint8), group=self._model, group_dst=self._root)

    def _receive(self, like: torch.Tensor, number: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        if received.numel():
            dist.recv(received.view(-1).view(torch.uint8), group=self._model, group_src=number)
        return received

    def sum(self, value: float) -> float:
        """The sum of one number over all ranks."""
        for group in (self._replicas, self._model):
            if group is not None:
                parts = torch.empty(group.size(), 1, dtype=torch.float64)
                dist.all_gather(list(parts), torch.tensor([value], dtype=torch.float64), group=group)
                value = float(parts.sum())
        return value

    def agree(self, values: torch.Tensor) -> None:
        """Make `values`, in host memory, those of the first rank."""
        for group, root in ((self._model, self._root), (self._replicas, 0)):
            if group is not None:
                dist.broadcast(values, group=group, group_src=root)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has, replica by replica, for each rank that holds a part of the model."""
        found = [mine]
        if self._replicas is not None:
            found = [None] * self._replicas.size()
            dist.all_gather_object(found, mine, group=self._replicas)
        return [each for column in self.of_model(found) for each in column]

    def of_model(self, mine: Any) -> list[Any]:
        """What each rank has that holds a part of the same replica."""
        if self._model is None:
            return [mine]
        found = [None] * self._model.size()
        dist.all_gather_object(found, mine, group=self._model)
        return found

    def close(self) -> None:
        """Nothing may be under way."""
        for group in (self._replicas, self._model):
            if group is not None:
                retire(group)
        self._replicas = self._model = None

"""A second way between the ranks of an engine, for one thread that works beside training.

Training's collectives are in one order, on one thread. What runs at its own pace has no place in that order, and so
gets a process group of its own: over gloo, as it exchanges host memory only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from infinity.comm.collectives import Ranks, all_gather
from infinity.comm.groups import twin


class SideChannel:
    """The ranks of `ranks` once more. Made on all of them by the thread that runs the model, used by one other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        if ranks.replicas is not None:
            self._group = twin(ranks.replicas, "gloo")
            dist.barrier(self._group)  # so that all are connected before anything is asked of it

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def shard_rank(self) -> int:
        return self._ranks.shard_rank

    @property
    def shards(self) -> int:
        return self._ranks.shards

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat tensor."""
        return self._ranks.shard(flat)

    def complete(self, flat: torch.Tensor) -> None:
        """Fill `flat` (numel,), host memory whose own shard is valid, with the shards of all ranks, on the first rank;
        the others give theirs.
        """
        if self._group is None or self.shards == 1:
            return
        if self.rank:
            dist.send(self.shard(flat), group=self._group, group_dst=0)
            return
        shards = flat.chunk(self.shards)
        arriving = [dist.irecv(shard, group=self._group, group_src=rank) for rank, shard in enumerate(shards) if rank]
        for transfer in arriving:
            assert transfer is not None
            transfer.wait()

    def sum(self, value: float) -> float:
        """The sum of one number over ranks."""
        if self._group is None:
            return value
        parts = torch.empty(self._ranks.size, dtype=torch.float64)
        all_gather(parts, torch.tensor([value], dtype=torch.float64), group=self._group)
        return float(parts.sum())

    def close(self) -> None:
        """Nothing may be under way."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

"""All-gather, reduce-scatter and all-reduce of host memory by direct exchange between every pair of ranks.

gloo's own collectives copy: its all-gather fills a temporary as large as the result, and its reduce-scatter is an
all-reduce of a copy, which moves twice the necessary bytes. Here each rank sends its part to every other rank and
receives the others' parts in place, like an all-to-all without copies. The bytes on the wire are the theoretical
minimum. Sums are taken in rank order, so results depend on neither timing nor stage. Figures:
bench/results/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from infinity.plan.pools import exchange_piece
from infinity.tiers.memory import host_tensor


class PairwiseCollectives:
    """Exchanges of `size` ranks over `group`, a gloo group in which this rank has number `rank`.

    Tensors are contiguous, 1-D, in host memory and of the same length on all ranks; rank r's part of n elements is
    [r n / size, (r + 1) n / size). Every call is blocking. Raises RuntimeError if a rank ends or does not join within
    the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, *, sums: int = 0) -> None:
        """sums: bytes of the largest part to be summed."""
        self._group = group
        self._rank = rank
        self._size = size
        self._piece = exchange_piece(sums, size)
        self._buffer = host_tensor(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the receive buffer for sums."""
        return 2 * (self._size - 1) * self._piece

    def all_gather_ints(self, words: Sequence[int]) -> list[list[int]]:
        """All-gather `words`: return each rank's integers, by rank. All ranks pass equally many."""
        heard = torch.empty(self._size, len(words), dtype=torch.int64)
        heard[self._rank] = torch.tensor(words)
        self._exchange(lambda to: heard[self._rank], lambda source: heard[source])()
        return heard.tolist()

    def all_gather(self, flat: torch.Tensor) -> None:
        """All-gather `flat` (n,) in place. This rank's part must be valid."""
        self._exchange(lambda to: self._part(flat, self._rank), lambda source: self._part(flat, source))()

    def reduce_scatter(self, flat: torch.Tensor) -> None:
        """Sum this rank's part of `flat` (n,) over ranks, in rank order. The other parts stay unchanged."""
        if self._size == 1:
            return
        own = self._part(flat, self._rank)
        step = self._piece // flat.element_size()
        # Parts differ by an element if the length is no multiple of the ranks. All ranks exchange as many pieces.
        longest = max(self._part(flat, rank).numel() for rank in range(self._size))
        starts = range(0, longest, step)
        # Two halves of the buffer: the next piece arrives while this one is added.
        arriving = self._receive(flat, 0, step, 0)
        for number, start in enumerate(starts):
            arrived, pieces = arriving
            if start + step < longest:
                arriving = self._receive(flat, start + step, step, (number + 1) % 2)
            arrived()
            _sum_in_order(pieces, self._rank, own[start : start + step])

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum `flat` (n,) over ranks, with the bits of `reduce_scatter`."""
        self.reduce_scatter(flat)
        self.all_gather(flat)

    def _receive(
        self, flat: torch.Tensor, start: int, step: int, half: int
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Start the exchange of a piece of every part.

        Returns a function that waits for it, and the pieces of this rank's part from the other ranks, in rank order.
        """
        length = self._part(flat, self._rank)[start : start + step].numel()
        place = self._buffer.view(flat.dtype).view(2, self._size - 1, -1)[half]
        others = [rank for rank in range(self._size) if rank != self._rank]
        pieces = {source: place[number, :length] for number, source in enumerate(others)}
        wait = self._exchange(lambda to: self._part(flat, to)[start : start + step], pieces.__getitem__)
        return wait, list(pieces.values())

    def _part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return flat[rank * flat.numel() // self._size : (rank + 1) * flat.numel() // self._size]

    def _exchange(
        self, outgoing: Callable[[int], torch.Tensor], incoming: Callable[[int], torch.Tensor]
    ) -> Callable[[], None]:
        """Start sending `outgoing(rank)` to every other rank and receiving `incoming(rank)` from it. Returns a function
        that waits for all.
        """
        works = []
        # Receives are posted first, so that the bytes of a fast rank arrive in place.
        for distance in range(1, self._size):
            source = (self._rank - distance) % self._size
            if (target := incoming(source)).numel():
                works.append(dist.irecv(target, group=self._group, group_src=source))
        for distance in range(1, self._size):
            to = (self._rank + distance) % self._size
            if (given := outgoing(to)).numel():
                works.append(dist.isend(given, group=self._group, group_dst=to))

        def wait() -> None:
            for work in works:
                assert work is not None  # None only on ranks outside of the group
                work.wait()

        return wait


def _sum_in_order(others: list[torch.Tensor], rank: int, own: torch.Tensor) -> None:
    """Set own to the sum of all ranks' parts in rank order, with `own` at position `rank`. Overwrites others."""
    # A sum in rank order, so that all ranks and stages get the same bits.
    parts = [*others[:rank], own, *others[rank:]]
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    torch.add(total, parts[-1], out=own)

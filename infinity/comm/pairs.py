"""All-gather, reduce-scatter and all-reduce of host memory, straight between every pair of ranks.

gloo's own collectives copy: its all-gather fills fresh memory as large as the result and copies it from there, and its
reduce-scatter is an all-reduce of a copy, which moves twice the bytes that are needed. Here each rank sends its part
to every other and receives theirs where they belong, as an all-to-all without its copies: the bytes on the wire are
the theory's, and what is summed is summed in the order of ranks, so that a result depends on neither timing nor stage.
Figures: bench/results/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from infinity.tiers.memory import host_tensor

BUFFER_BYTES = 16 << 20
"""Of one rank, for what others send it to be summed: two pieces of each of them, one being summed, one arriving."""
_PIECES = (256 << 10, 4 << 20)
"""Bytes of a piece, at least and at most: smaller ones cost round trips, larger ones leave the cache."""
_LINE = 64
"""Bytes that a piece is a multiple of: whole elements of every dtype."""


class Pairs:
    """Exchanges of `size` ranks over `group`, a gloo group in which this rank has number `rank`.

    Tensors are contiguous, 1-D, in host memory and of the same length on all ranks; rank r's part of n elements is
    [r n / size, (r + 1) n / size). Every call waits until it is done. Raises RuntimeError if a rank ends or does not
    come within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, *, sums: int = 0) -> None:
        """sums: bytes of the longest part that will be summed."""
        self._group = group
        self._rank = rank
        self._size = size
        low, high = _PIECES
        piece = max(low, min(high, BUFFER_BYTES // (2 * max(1, size - 1))))
        self._piece = min(piece // _LINE, -(-sums // _LINE)) * _LINE
        self._buffer = host_tensor(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that what arrives is summed from."""
        return 2 * (self._size - 1) * self._piece

    def tell(self, words: Sequence[int]) -> list[list[int]]:
        """What every rank says, by rank: as many integers as this one, which says `words`."""
        heard = torch.empty(self._size, len(words), dtype=torch.int64)
        heard[self._rank] = torch.tensor(words)
        self._exchange(lambda to: heard[self._rank], lambda source: heard[source])()
        return heard.tolist()

    def all_gather(self, flat: torch.Tensor) -> None:
        """Complete `flat` (n,), whose own part is valid, with the parts of the others."""
        self._exchange(lambda to: self._part(flat, self._rank), lambda source: self._part(flat, source))()

    def reduce_scatter(self, flat: torch.Tensor) -> None:
        """Sum this rank's part of `flat` (n,) over ranks, in their order. The other parts stay as they are."""
        if self._size == 1:
            return
        own = self._part(flat, self._rank)
        step = self._piece // flat.element_size()
        longest = max(self._part(flat, rank).numel() for rank in range(self._size))
        starts = range(0, longest, step)
        arriving = self._receive(flat, 0, step, 0)
        for number, start in enumerate(starts):
            arrived, pieces = arriving
            if start + step < longest:
                arriving = self._receive(flat, start + step, step, (number + 1) % 2)
            arrived()
            _sum_in_order(pieces, self._rank, own[start : start + step])

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum `flat` (n,) over ranks: the same bits as `reduce_scatter` gives, on all of them."""
        self.reduce_scatter(flat)
        self.all_gather(flat)

    def _receive(
        self, flat: torch.Tensor, start: int, step: int, half: int
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Start to exchange a piece of every part: a call that waits for it, and what of this rank's part arrives from
        each other rank, in their order.
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
        """Send `outgoing(rank)` to every other rank and receive `incoming(rank)` from it; returns what waits for
        all.
        """
        works = []
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
                assert work is not None  # as it is on ranks that are not of the group
                work.wait()

        return wait


def _sum_in_order(others: list[torch.Tensor], rank: int, own: torch.Tensor) -> None:
    """own = the sum of `others` with `own` as the `rank`-th among them, added one after another. Overwrites others."""
    parts = [*others[:rank], own, *others[rank:]]
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    torch.add(total, parts[-1], out=own)

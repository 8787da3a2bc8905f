"""Warns if data-parallel ranks begin training with the same batch, as without a distributed sampler."""

from __future__ import annotations

import hashlib

import torch
from torch.utils._pytree import tree_iter

from infinity.comm.communicator import Communicator
from infinity.observe.log import logger
from infinity.units.modes import outside_modes

_LIMIT = 1 << 18
"""Elements of a tensor that are compared."""


class FirstBatches:
    """Compares the arguments of the first training forward over the data-parallel ranks of one engine."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._digest: bytes | None = None
        self._seen = self._compared = ranks.is_single

    def see(self, arguments: object) -> None:
        """Keep a digest of the first forward's arguments. Later calls cost nothing, and torch.func's do not count."""
        if not self._seen and not torch._C._are_functorch_transforms_active():
            self._seen = True
            self._digest = digest_of(arguments)

    def compare(self) -> None:
        """Log a warning on rank 0 if ranks had the same first batch. Collective in the first step, and only there."""
        if self._compared:
            return
        self._compared = True
        size = self._ranks.size
        found = self._ranks.gather(self._digest)
        if not self._ranks.is_main_rank:
            return
        same = alike(found[:size])  # ranks of tensor parallelism share their batches
        if same:
            logger.warning(
                "ranks %s began training with bit-identical batches, so they compute the same gradients. Give each "
                "rank its own part of the data: pass training_data to infinity.initialize(), or use "
                "torch.utils.data.DistributedSampler in your DataLoader.",
                " and ".join(map(str, same)),
            )


def alike(digests: list[bytes | None]) -> list[int]:
    """Return the ranks whose digest is that of the first rank that shares its own; [] if all differ or are None."""
    for digest in digests:
        if digest is not None and digests.count(digest) > 1:
            return [rank for rank, other in enumerate(digests) if other == digest]
    return []


def digest_of(arguments: object) -> bytes | None:
    """Return a digest of the tensors in `arguments`; None if each of them has a single value, as zeros have."""
    found, varied = hashlib.blake2b(digest_size=16), False
    with torch.no_grad(), outside_modes():
        for leaf in tree_iter(arguments):
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.numel() and not leaf.is_meta:
                values = leaf.detach().reshape(-1)[:_LIMIT].cpu().resolve_conj().resolve_neg().contiguous()
                varied = varied or not bool((values == values[0]).all())
                found.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
                found.update(values.view(torch.uint8).numpy().tobytes())
    return found.digest() if varied else None

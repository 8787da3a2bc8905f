"""Warns if data-parallel ranks begin training with the same batches, as without a distributed sampler."""

from __future__ import annotations

import hashlib

import torch
from torch.utils._pytree import tree_iter

from infinity.comm.agreement.announcements import Operation
from infinity.comm.communicator import Communicator
from infinity.observe.log import logger
from infinity.units.modes import outside_modes

_CHUNK = 1 << 20
"""Elements of a tensor that are in host memory at a time."""
_CHUNKS = 32
"""Chunks of a tensor that are read; of a larger one they are evenly spaced."""


class FirstBatches:
    """Compares the arguments of the first step's forwards over the data-parallel ranks of one engine."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._digest = None if ranks.is_single else Digest()

    def see(self, arguments: object) -> None:
        """Add the arguments of a forward. Later steps cost nothing, and torch.func's forwards do not count."""
        if self._digest is not None and not torch._C._are_functorch_transforms_active():
            self._digest.add(arguments)

    def compare(self) -> None:
        """Log a warning on rank 0 if ranks had the same batches. All ranks call it in every step; it is a collective in
        the first one only.
        """
        if self._digest is None:
            return
        mine, self._digest = self._digest.value(), None
        found = self._ranks.gather(mine, Operation.COMPARE_BATCHES)
        same = alike(found[: self._ranks.size])  # the others share these batches: they hold parts of the same model
        if same and self._ranks.is_main_rank:
            logger.warning(
                "ranks %s began training with bit-identical batches, so they compute the same gradients. Give each "
                "rank its own part of the data: pass training_data to initialize(), or use "
                "torch.utils.data.DistributedSampler in your DataLoader.",
                " and ".join(map(str, same)),
            )


class Digest:
    """A digest of the tensors among arguments: their values, shapes and dtypes."""

    def __init__(self) -> None:
        self._found, self._varied = hashlib.blake2b(digest_size=16), False

    def add(self, arguments: object) -> None:
        with torch.no_grad(), outside_modes():
            for leaf in tree_iter(arguments):
                if type(leaf) is torch.Tensor and leaf.numel() and _has_bytes(leaf):
                    self._add(leaf)

    def _add(self, tensor: torch.Tensor) -> None:
        self._found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor.narrow(dim, 0, 1) if stride == 0 else tensor  # an expanded mask may exceed memory
        chunks = tensor.detach().resolve_conj().resolve_neg().reshape(-1).split(_CHUNK)
        first = None
        for chunk in chunks[:: -(-len(chunks) // _CHUNKS)]:
            held = chunk.to("cpu", copy=True, memory_format=torch.contiguous_format)
            values = held.view(torch.uint8).view(len(held), -1)
            first = values[0] if first is None else first
            self._varied = self._varied or not torch.equal(values, first.expand_as(values))
            self._found.update(values.numpy().data)

    def value(self) -> bytes | None:
        """Return the digest; None if no tensor has two different elements, since ranks may share zeros or ones."""
        return self._found.digest() if self._varied else None


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has values to read, unlike sparse, meta and quantised tensors, and those of vmap."""
    readable = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return readable and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def alike(digests: list[bytes | None]) -> list[int]:
    """Return the ranks whose digest is that of the first rank that shares its own; [] if all differ or are None."""
    for digest in digests:
        if digest is not None and digests.count(digest) > 1:
            return [rank for rank, other in enumerate(digests) if other == digest]
    return []

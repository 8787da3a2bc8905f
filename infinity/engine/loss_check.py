"""Checks a loss on an accelerator while its backward is issued, so that the host does not wait in between.

Warns if data-parallel ranks begin training with the same batches, as without a distributed sampler.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from infinity.comm.agreement.announcements import Operation
from infinity.comm.communicator import Communicator
from infinity.errors import UsageError
from infinity.observe.log import logger
from infinity.tiers.device import Device
from infinity.units.compiled import outside_modes


class LossReader:
    """Copies losses to host memory, one at a time."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @cached_property
    def host(self) -> torch.Tensor:
        """Memory for one loss, uint8 (8,)."""
        return self.device.host_buffer(torch.float64.itemsize)

    def can_read(self, loss: torch.Tensor) -> bool:
        return type(loss) is torch.Tensor and not self.device.is_host(loss) and loss.is_floating_point()


class LossCheck:
    """The check of one backward's loss. Updates of that backward wait for it, each in the thread that updates."""

    def __init__(self, reader: LossReader, loss: torch.Tensor, ranks: Communicator, refused: int) -> None:
        """loss: a scalar that is being computed. refused: units of former steps that this rank did not update."""
        self._loss = loss.detach().reshape(1)  # alive while it is copied
        self._device = reader.device
        self._ranks = ranks
        self._refused = float(refused)
        self._host = reader.host[: loss.itemsize]
        self._computed = reader.device.compute_reached()
        self._copied = reader.device.copy(self._host, self._loss.view(torch.uint8))
        self._totals: Future[tuple[float, ...]] | None = None
        self._result: tuple[float, ...] | None = None

    def start(self) -> None:
        """Start the exchange with other ranks, after their earlier collectives. Idempotent. All ranks call it at the
        same place.
        """
        if self._totals is None and not self._ranks.is_single:
            self._totals = self._ranks.sums_later(self._read)

    def _read(self) -> tuple[float, float]:
        recorder = self._device.recorder
        with recorder.wait("compute", "loss"):
            self._computed.wait()
        with recorder.wait("device_to_host", "small copies"):
            self._copied.wait()
        value = self._device.numbers(self._host.view(self._loss.dtype))[0]
        return 0.0 if math.isfinite(value) else 1.0, self._refused

    def result(self) -> tuple[float, ...]:
        """Return the number of ranks whose loss is not finite, and of units refused by earlier updates, on all ranks.

        Waits until both are known.
        """
        if self._result is None:
            if self._ranks.is_single:
                self._result = self._read()
            else:
                assert self._totals is not None, "start was not called"
                with self._device.recorder.wait("reduce", "collectives"):
                    self._result = self._totals.result()
        return self._result

    def passed(self) -> bool:
        """Return whether the backward's updates may happen, once it is known. Any thread may call it."""
        return not any(self.result())


def check_scalar(loss: Any, error: type[UsageError] = UsageError, call: str = "backward") -> None:
    """Raise `error` if `loss` is not a scalar of a graph. call: the engine's method that got it."""
    if not isinstance(loss, torch.Tensor):
        problem = f"is a {type(loss).__name__}"
    elif loss.numel() != 1:
        problem = f"has shape {list(loss.shape)}"
    elif not loss.requires_grad:
        problem = "has no graph"
    else:
        return
    raise error(
        f"engine.{call}(loss) needs a scalar tensor computed from engine(batch) with gradients enabled, and this one "
        f"{problem}"
    )


def warn_of_sums(accumulation: int) -> None:
    """Log that a plain backward sums where `engine.backward` averages. accumulation: micro-batches of a step."""
    logger.warning(
        "loss.backward() sums the gradients of a step's %d micro-batches, as in PyTorch; engine.backward(loss) "
        "averages them. To average, call engine.backward(loss). If the loss is divided already, or the sum is meant, "
        "call engine.backward(loss, scale_wrt_gas=False): the same gradients, without this warning.",
        accumulation,
    )


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

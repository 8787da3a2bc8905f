"""Checks a loss on an accelerator while its backward is issued, so that the host does not wait in between."""

from __future__ import annotations

import math
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from infinity.comm.communicator import Communicator
from infinity.errors import UsageError
from infinity.tiers.device import Device


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

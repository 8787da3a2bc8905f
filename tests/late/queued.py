"""Collectives of one rank that a device executes after they return, as NCCL does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "queued"


class Work(dist._Work):
    """A collective on a stream of its group, which the caller's stream waits for."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self._ended = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        self._ended.wait(torch.accelerator.current_stream())
        return True


class QueuedGroup(dist.ProcessGroup):
    """A group of one rank whose collectives double their input, so that it shows when they ran."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        assert size == 1
        self._stream: torch.Stream | None = None

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Work:
        return self._double(source, output)

    _reduce_scatter_base = all_gather_single = reduce_scatter_single = _allgather_base

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._double(tensors[0], tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._double(tensors[0], tensors[0])

    def _double(self, source: torch.Tensor, output: torch.Tensor) -> Work:
        if self._stream is None:
            self._stream = torch.Stream(source.device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            torch.mul(source, 2, out=output)
        return Work(self._stream)


def register() -> None:
    """Register the backend with torch. Idempotent."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> QueuedGroup:
        return QueuedGroup(rank, size)

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["late"])

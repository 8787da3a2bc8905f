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
    """A group of one rank whose collectives multiply their input by `factor`."""

    def __init__(self, rank: int, size: int, name: str, factor: int) -> None:
        super().__init__(rank, size)
        assert size == 1
        self._backend, self._factor = name, factor
        self._stream: torch.Stream | None = None

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Work:
        return self._multiply(source, output)

    _reduce_scatter_base = all_gather_single = reduce_scatter_single = _allgather_base

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._multiply(tensors[0], tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._multiply(tensors[0], tensors[0])

    def _multiply(self, source: torch.Tensor, output: torch.Tensor) -> Work:
        if self._stream is None:
            self._stream = torch.Stream(source.device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            torch.mul(source, self._factor, out=output)
        return Work(self._stream)


def register(name: str = NAME, factor: int = 2) -> str:
    """Register a backend with torch, by default one that doubles, so that it shows when a collective ran. Idempotent.

    Returns `name`.
    """

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> QueuedGroup:
        return QueuedGroup(rank, size, name, factor)

    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, devices=["late"])
    return name

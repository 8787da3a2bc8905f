"""The first of several ranks, whose collectives take the time of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from infinity import concurrency
from infinity.comm.agreement.announcements import Announcement, Operation
from infinity.comm.communicator import Communicator, Traffic
from infinity.comm.dtensor import TensorParallelMesh
from infinity.plan.layout import UnitLayout
from infinity.plan.pools import largest_sum
from infinity.sim.clock import Clock
from infinity.sim.device import SimulatedAccelerator, SimulatedDevice
from infinity.tiers.transfer import Transfer

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks to simulate."""

    size: int = 1
    per_node: int = 1


class SimulatedCommunicator(Communicator):
    """Rank 0 of `ranks.size` ranks, whose parts of sums are those of this rank."""

    def __init__(
        self, clock: Clock, device: SimulatedDevice, ranks: Ranks, bandwidth: float | None, *, sharded: bool
    ) -> None:
        """bandwidth: bytes/s of a collective's whole tensor."""
        self._clock = clock
        self._device = device
        self._sharded = sharded
        self._bandwidth = bandwidth
        self.traffic = Traffic()
        self.nbytes = 0
        self.rank, self.size = 0, ranks.size
        self._per_node = ranks.per_node
        self.backend = "" if ranks.size == 1 else "gloo" if device.host_addressable else "nccl"
        self.replicas = None
        self.model = TensorParallelMesh()
        if self.backend:
            self._thread = concurrency.one_thread("infinity-comm", device.enter_thread)

    @property
    def is_main_rank(self) -> bool:
        """False: nothing is logged or written."""
        return False

    @property
    def error(self) -> str:
        return ""

    @property
    def exchanges(self) -> int:
        return 0

    @property
    def local_size(self) -> int:
        return self._per_node

    def set_layouts(self, units: Sequence[UnitLayout]) -> None:
        self._units = units
        if self.backend == "gloo":
            self.nbytes = largest_sum(units, self.size)

    def check_consistent(self, lines: Sequence[str]) -> None:
        """The other ranks are like this one."""

    def smallest(self, sizes: Sequence[int], lines: Sequence[str]) -> list[int]:
        return list(sizes)

    @contextmanager
    def construction(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        if self.backend:
            self._thread.shutdown()

    def _agreed(
        self, announced: Announcement, present: set[int], collective: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        return collective(*arguments)

    def _together(self, announced: Announcement, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Wait for the thread of collectives, whose small exchanges take no time."""
        self._thread.submit(lambda: None).result()
        if announced.operation is Operation.BARRIER:
            return None  # type: ignore[return-value]
        return work(*arguments)

    def _all_gather(self, flat: torch.Tensor, after: Transfer, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        self._device.await_copy(after)
        return self._exchange("gather", flat.nbytes)

    def _reduce_scatter(self, flat: torch.Tensor, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        return self._exchange("reduce", flat.nbytes)

    def _all_reduce(self, flat: torch.Tensor, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        return self._exchange("reduce", 2 * flat.nbytes)

    def _exchange(self, lane: str, nbytes: int) -> Transfer:
        assert self._bandwidth is not None, "links have no bandwidth of collectives"
        seconds = nbytes / self._bandwidth
        if isinstance(self._device, SimulatedAccelerator):
            record = self._device.stream.run(seconds, lane, nbytes=nbytes)
        else:
            record = self._clock.sleep(lane, seconds, nbytes=nbytes)
        self._clock.submitted.append(record)
        return self._device.compute_reached()

    def _complete(self, flat: torch.Tensor) -> None:
        self._exchange("gather", flat.nbytes)

    def union(self, members: set[int], operation: Operation = Operation.REFRESH_VIEWS) -> set[int]:
        return members

    def _sum(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * self.size for value in values)

    def _gather_objects(self, mine: Any) -> list[Any]:
        return [mine] * self.size

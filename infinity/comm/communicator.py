"""Collectives over the ranks of one engine.

Every all-gather and reduce-scatter runs on one thread, first in, first out, on a process group of the engine's own. So
all ranks issue the same collectives in the same order, regardless of when reads complete. They agree on each one
(`infinity.comm.agreement.announcer`): ranks that gather different units would deadlock or exchange unrelated bytes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from infinity import concurrency
from infinity.comm.agreement.announcements import Announcement, Operation, flag_words, pack_flags, unpack_flags
from infinity.comm.agreement.announcer import Announcer
from infinity.comm.agreement.comparison import disagreement
from infinity.comm.dtensor import TensorParallelMesh
from infinity.comm.groups import (
    Group,
    OnDevice,
    backend_of,
    data_parallel,
    destroy_group,
    duplicate_group,
    gather_objects,
)
from infinity.comm.liveness.heartbeat import RANK_TIMEOUT, Heartbeats
from infinity.comm.pairs import PairwiseCollectives
from infinity.comm.thread import CollectiveThread
from infinity.errors import RanksError
from infinity.inputs import number_of
from infinity.plan.layout import UnitLayout
from infinity.plan.policy import RankInfo
from infinity.plan.pools import largest_sum
from infinity.sizes import sum_in_order
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.transfer import Transfer, run_on

# torch 2.13 renames these functions; earlier versions only have the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_Result = TypeVar("_Result")


@dataclass
class Traffic:
    """Numbers of collectives, and their bytes in full (unsharded) tensors."""

    all_gather_bytes: int = 0
    all_gathers: int = 0
    reduce_scatter_bytes: int = 0
    reduce_scatters: int = 0
    all_reduce_bytes: int = 0
    all_reduces: int = 0


class Communicator:
    """Data-parallel ranks of one engine. Without an initialised process group there is one, and nothing is exchanged.

    sharded: units have one shard per rank; otherwise one shard, replicated on all ranks. group: the ranks, by default
    all; see `infinity.comm.groups.data_parallel`. rank_timeout: seconds without a heartbeat after which a rank is
    lost; 0: never.
    """

    def __init__(
        self, device: Device, *, sharded: bool = True, group: Group | None = None, rank_timeout: float = RANK_TIMEOUT
    ) -> None:
        self._device = device
        self._sharded = sharded
        self.traffic = Traffic()
        self._units: Sequence[UnitLayout] = ()
        self._flag_words = 0
        self.nbytes = 0
        """Bytes of host memory allocated for collectives."""
        self.rank, self.size = 0, 1
        self.backend = ""
        self._met = False
        self.replicas = data_parallel(group)
        self.model = TensorParallelMesh()
        """The model-parallel ranks of this replica."""
        if self.replicas is not None:
            self.rank, self.size = dist.get_rank(self.replicas), dist.get_world_size(self.replicas)
            self.backend = backend_of(self.replicas, device.torch_device)
            self._group = duplicate_group(self.replicas, self.backend)
            # Sums of host memory would wait for the collectives of units on a device.
            self._host = self._group if self.backend == "gloo" else duplicate_group(self.replicas, "gloo")
            self._pairs = PairwiseCollectives(self._host, self.rank, self.size)
            # A group of its own, which outlives the others if ranks disagree: see `_leave`.
            self._words = duplicate_group(self.replicas, "gloo")
            self._heartbeats = Heartbeats(self._words, self.rank, self.size, rank_timeout)
            pending = None if self.backend == "gloo" else OnDevice(self._group, device)
            self._announcer = Announcer(self._words, self.rank, self.size, pending, self._heartbeats.cause)
            ranks = dist.get_process_group_ranks(self.replicas)
            self._thread: Executor = (thread := CollectiveThread("infinity-comm", ranks, device.enter_thread))
            self._given_up: Callable[[], str] = lambda: thread.error

    @cached_property  # as the two below: asked several times for each unit in a step
    def is_single(self) -> bool:
        """Return whether there is no process group, so that collectives are skipped. A group of one runs them."""
        return not self.backend

    @property
    def is_main_rank(self) -> bool:
        """Return whether this is the main rank, which logs and writes shared files."""
        return self.rank == 0 and self.model.first

    @property
    def error(self) -> str:
        """The error that prevents all further collectives; empty if there is none."""
        return "" if self.is_single else self._announcer.error or self._given_up()

    @property
    def cause(self) -> Callable[[], str]:
        """Function that returns which ranks left and why, after a collective has failed."""
        return str if self.is_single else self._heartbeats.cause

    @property
    def exchanges(self) -> int:
        """Number of exchanges of announcements."""
        return 0 if self.is_single else self._announcer.exchanges

    @property
    def info(self) -> RankInfo:
        """Return the properties of the ranks that a plan depends on."""
        return RankInfo(self.size, self.shards, self.backend, self.model.size)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node, tensor-parallel ones included; without torchrun's LOCAL_WORLD_SIZE, all."""
        every = self.size * self.model.size
        return max(1, min(every, number_of("LOCAL_WORLD_SIZE", every, least=1)))

    @cached_property
    def shards(self) -> int:
        """Number of shards of a unit."""
        return self.size if self._sharded else 1

    @cached_property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self.rank if self._sharded else 0

    def set_mesh(self, mesh: TensorParallelMesh) -> None:
        """Set the model-parallel ranks, which the model's DTensors name. All of them call it, once.

        Not a constructor argument: this object sends the errors of reading the model to the other ranks.
        """
        self.model = mesh
        if mesh.size > 1:
            self._heartbeats.connect(mesh)

    def set_layouts(self, units: Sequence[UnitLayout]) -> None:
        """Set the layouts of units, by index; the same on all ranks. Allocates the buffers of collectives."""
        self._units = units
        # The same number of words for every collective, so that ranks that issue different ones can compare them.
        self._flag_words = flag_words(max(len(layout.slots) for layout in units))
        if self.backend == "gloo":
            self._pairs = PairwiseCollectives(self._host, self.rank, self.size, sums=largest_sum(units, self.size))
            self.nbytes = self._pairs.nbytes
        if not self.is_single:
            self._announcer.units = units

    def _straight(self, flat: torch.Tensor) -> bool:
        """Return whether `PairwiseCollectives` exchanges `flat` instead of the backend: host memory on gloo."""
        return self.backend == "gloo" and flat.device.type == "cpu"

    def check_consistent(self, lines: Sequence[str]) -> None:
        """Compare `lines` (`comm.agreement.comparison.in_common`) over ranks. Raises RanksError on all ranks if
        they differ or if a rank failed before.
        """
        if self.is_single:
            return
        # From here on the other ranks may issue collectives, so that an error is announced as one of them.
        self._met = True
        self._compare(lines)

    def smallest(self, sizes: Sequence[int], lines: Sequence[str]) -> list[int]:
        """Return the smallest of each size over data-parallel ranks, before `check_consistent`.

        lines: the first ones of `check_consistent`, for ranks that take no part and are there already. Raises
        RanksError on all ranks if lines differ or if a rank failed before.
        """
        if self.is_single:
            return list(sizes)
        self._compare(lines)
        return self._thread.submit(self._smallest, sizes).result()

    def _smallest(self, sizes: Sequence[int]) -> list[int]:
        found = torch.tensor(sizes, dtype=torch.int64)
        with self._announcer.ended_ranks_raise():
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._words)
        return [int(size) for size in found]

    def _compare(self, lines: Sequence[str]) -> None:
        self._announcer.error = self._thread.submit(self._meet, lines).result()
        if self.error:
            raise RanksError(self.error)

    def _meet(self, lines: Sequence[str]) -> str:
        with self._announcer.ended_ranks_raise():
            return disagreement(lines, self._announcer.failure, self._words)

    @contextmanager
    def construction(self) -> Iterator[None]:
        """Guard the construction of an engine. On an error, inform the other ranks and leave the groups."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            self.close()
            raise

    def give_up(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks, whose next collective raises it instead of waiting.

        Does nothing if all ranks have the same error or the others have left.
        """
        if self.is_single or self.error or not isinstance(error, Exception):
            return
        self._announcer.failure = f"{type(error).__name__}: {error}"
        with suppress(RanksError):
            # Ranks that are not there yet compare lines next: this rank takes part in that exchange with its error.
            if self._met:
                self._together(Announcement(Operation.GIVE_UP), lambda: None)
            else:
                self.check_consistent([])

    def all_gather(self, flat: torch.Tensor, after: Transfer, unit: int) -> Transfer:
        """All-gather `flat` (numel,) of a unit in place. This rank's shard is valid once `after` is done."""
        if self.is_single or not self._sharded:
            return after
        self.traffic.all_gathers += 1
        self.traffic.all_gather_bytes += flat.numel() * flat.element_size()
        # Recorded by the calling thread, since the thread of collectives has a stream of its own.
        reached = self._device.compute_reached()
        announced = Announcement(Operation.ALL_GATHER, unit)
        return run_on(self._thread, self._agreed, announced, set(), self._all_gather, flat, after, reached)

    def reduce(self, flat: torch.Tensor, layout: UnitLayout, present: set[int]) -> Transfer:
        """Sum `flat` (numel,), a unit's gradient, over ranks, after the compute issued so far by this thread.

        When done, this rank's shard holds the sum. present: slots with a gradient on this rank. Slots of the other
        ranks are added to it in place.
        """
        reached = self._device.compute_reached()
        if self.is_single:
            return reached
        collective = self._reduce_scatter
        if self._sharded:
            self.traffic.reduce_scatters += 1
            self.traffic.reduce_scatter_bytes += flat.numel() * flat.element_size()
        else:
            collective = self._all_reduce
            self.traffic.all_reduces += 1
            self.traffic.all_reduce_bytes += flat.numel() * flat.element_size()
        announced = Announcement(Operation.REDUCE, layout.index)
        return run_on(self._thread, self._agreed, announced, present, collective, flat, reached)

    def _agreed(
        self, announced: Announcement, present: set[int], collective: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Return `collective(*arguments)`, which all ranks issue.

        present: slots or flags, to which those of the other ranks are added. Raises RanksError on all ranks if they
        issue different collectives, for this and every later one.
        """
        try:
            with self._device.recorder.naming("" if announced.unit is None else self._units[announced.unit].name):
                return self._announcer.run(announced, present, self._flag_words, lambda: collective(*arguments))
        # On this thread, which issues collectives: none can begin while the groups are destroyed.
        finally:
            if self.error:
                self._leave()

    def _leave(self) -> None:
        """Leave the groups of collectives, which ends the wait of ranks that wait in one for this rank. Idempotent.

        A thread that was given up may call it beside `close`.
        """
        # One atomic step, as two threads may come here at once.
        group = self.__dict__.pop("_group", None)
        if group is not None:
            if self.error:
                self._announcer.abort()
            # On gloo both are the same group.
            for each in dict.fromkeys((group, self._host)):
                destroy_group(each)
            del self._host, self._pairs  # the last references, which keep connections open

    def _together(self, announced: Announcement, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return `work(*arguments)`, run on the thread of collectives, once all ranks issue it alike."""
        with self._device.recorder.wait("reduce", "collectives"):
            return self._thread.submit(self._agreed, announced, set(), work, *arguments).result()

    def begin(self, call: Announcement) -> None:
        """Wait until all ranks have begun the same call. Raises RanksError on all ranks if one does something else."""
        if not self.is_single:
            self._together(call, lambda: None)

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat tensor: a view (numel / shards,), or `flat` itself."""
        shards = self.shards
        if shards == 1:
            return flat
        length = flat.numel() // shards
        return flat[self.shard_rank * length : (self.shard_rank + 1) * length]

    # Each returns the transfer that ends with it, on the thread's stream.

    def _all_gather(self, flat: torch.Tensor, after: Transfer, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        try:
            self._device.await_copy(after)
        finally:  # after an error the shard is invalid, but other ranks wait for it: collectives must stay in step
            with self._recorded("gather", flat):
                self._gather(_apart(flat))
        return self._device.compute_reached()

    def _recorded(self, lane: str, flat: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which a collective of `flat` is issued."""
        clock = concurrency.now if flat.device.type == "cpu" else self._device.stamp
        return self._device.recorder.span(lane, "", flat.nbytes, clock)

    def _reduce_scatter(self, flat: torch.Tensor, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        with self._recorded("reduce", flat):
            if self._straight(flat):
                self._pairs.reduce_scatter(_apart(flat))
            elif self.backend == "gloo":  # must not write into its input
                shard = torch.empty_like(self.shard(flat))
                _reduce_scatter(shard, flat, group=self._group)
                self.shard(flat).copy_(shard)
            else:
                _reduce_scatter(self.shard(flat), flat, group=self._group)
        return self._device.compute_reached()

    def _all_reduce(self, flat: torch.Tensor, reached: Transfer) -> Transfer:
        self._device.await_copy(reached)
        with self._recorded("reduce", flat):
            if self._straight(flat):
                self._pairs.all_reduce(_apart(flat))
            else:
                dist.all_reduce(flat, group=self._group)
        return self._device.compute_reached()

    def _gather(self, flat: torch.Tensor) -> None:
        if self._straight(flat):
            self._pairs.all_gather(flat)
        else:
            _all_gather(flat, self.shard(flat), group=self._group)

    def complete(self, flat: torch.Tensor) -> None:
        """All-gather `flat` (numel,) in place, in host memory. This rank's shard must be valid."""
        if not self.is_single and self._sharded:
            self._together(Announcement(Operation.ALL_GATHER_STATE, length=flat.numel()), self._complete, flat)

    def _complete(self, flat: torch.Tensor) -> None:
        there = flat.to(self._device.torch_device)
        self._gather(there)
        if there is not flat:
            flat.copy_(there)

    def broadcast(self, flat: torch.Tensor, source: int = 0, unit: int | None = None) -> None:
        """Broadcast `flat`, on host or device, from rank `source`. unit: the one whose values it holds, if any."""
        if not self.is_single:
            reached = self._device.compute_reached()
            # A unit names its length already; ranks that broadcast it from different sources must be found, too.
            length = flat.numel() if unit is None else source
            self._together(Announcement(Operation.BROADCAST, unit, length), self._broadcast, flat, source, reached)

    def _broadcast(self, flat: torch.Tensor, source: int, reached: Transfer) -> None:
        self._device.await_copy(reached)
        there = _apart(flat).to(self._device.torch_device)
        dist.broadcast(there, group_src=source, group=self._group)
        # Addresses and not objects: `_apart` returns another tensor over the same memory.
        if there.data_ptr() != flat.data_ptr():
            flat.copy_(there)
        self._device.compute_reached().wait()

    def union(self, members: set[int], operation: Operation = Operation.REFRESH_VIEWS) -> set[int]:
        """Return the union of unit indices over ranks. Without shards, returns `members` without a collective.

        operation: purpose of the exchange.
        """
        if self.is_single or not self._sharded:
            return members
        flags = pack_flags(members, flag_words(len(self._units)))
        announced = Announcement(operation, length=len(flags))
        said = self._together(announced, lambda: self._pairs.all_gather_ints(flags))
        return set().union(*map(unpack_flags, said))

    def ended_streams(self, ends: bool) -> Future[list[int]]:
        """Return the future data-parallel ranks that pass True: those that read no further tensor of a stream of
        sharded weights. Does not wait, since a rank may end its stream at any time.
        """
        announced = Announcement(Operation.STREAM_TENSOR, length=1)
        return self._thread.submit(self._agreed, announced, set(), self._ended, ends)

    def _ended(self, ends: bool) -> list[int]:
        said = self._pairs.all_gather_ints([int(ends)])
        return [rank for rank, [flag] in enumerate(said) if flag]

    def sum(self, value: float) -> float:
        """Return the sum of one fp64 number over ranks, in rank order, with the same bits on all."""
        return self.sums(value)[0]

    def sums(self, *values: float, operation: Operation = Operation.SUM) -> tuple[float, ...]:
        """Return the sum of each number, in one exchange. operation: purpose of the sum."""
        if self.is_single:
            return values
        return self._together(Announcement(operation, length=len(values)), self._sum, values)

    def sums_later(self, values: Callable[[], tuple[float, ...]]) -> Future[tuple[float, ...]]:
        """Return the future `sums` of what `values` returns in the thread of collectives, on several ranks."""
        announced = Announcement(Operation.SUM, length=2)
        return self._thread.submit(self._agreed, announced, set(), lambda: self._sum(values()))

    def totals(self, *values: float, operation: Operation = Operation.SUM) -> tuple[float, ...]:
        """Return the sum of each number over all data- and model-parallel ranks."""
        return self.model.sums(*self.sums(*values, operation=operation))

    def _sum(self, values: tuple[float, ...]) -> tuple[float, ...]:
        # On the host: the device's stream has collectives of units queued, which a sum would wait for.
        mine = torch.tensor(values, dtype=torch.float64)
        parts = torch.empty(self.size * len(values), dtype=torch.float64)
        with self._device.recorder.span("reduce", "sum", parts.nbytes):
            _all_gather(parts, mine, group=self._host)
        return tuple(sum_in_order(column) for column in zip(*parts.view(self.size, -1).tolist(), strict=True))

    def gather(self, mine: Any, operation: Operation = Operation.EXCHANGE) -> list[Any]:
        """All-gather a small object over data- and model-parallel ranks; data-parallel ranks vary fastest.

        operation: purpose of the exchange.
        """
        if self.is_single:
            return self.model.gather(mine)
        found: list[Any] = self._together(Announcement(operation, length=1), self._gather_objects, mine)
        return [each for column in self.model.gather(found) for each in column]

    def _gather_objects(self, mine: Any) -> list[Any]:
        return gather_objects(mine, self._host)

    def barrier(self) -> None:
        if not self.is_single:
            self._together(Announcement(Operation.BARRIER), lambda: dist.barrier(self._host))

    def close(self) -> None:
        """Leave the groups. Ranks that still wait for this one fail when their connections close."""
        if not self.is_single:
            # The reason first: the connections that close next would otherwise be the loss of a rank.
            self._heartbeats.leave(sys.exc_info()[1])
            self._thread.shutdown()
            self._heartbeats.close()
            self._leave()
            # Last, because other ranks may still exchange announcements with this one.
            self._announcer.close()
            destroy_group(self._words)
            del self._words


def refuse(error: Exception, group: Group | None) -> None:
    """Send `error` to the other ranks, which are constructing an engine that this rank cannot construct."""
    with suppress(type(error)), Communicator(CpuDevice(), group=group).construction():
        raise error


def _apart(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same host memory that does not count as a user of `flat`'s storage.

    gloo's threads drop their references shortly after a collective is done. A buffer released in between would seem to
    be in use. Device tensors are returned unchanged.
    """
    if flat.device.type != "cpu":
        return flat
    memory = (ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=flat.dtype)

"""Rates of host memory, of copies to and from the device, of matmuls and of all-gathers, through the engine's own code.

All kinds are measured in every round, in an order that rotates, so that other load affects all equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from statistics import median
from types import TracebackType

import torch
import torch.distributed as dist
from torch.nn import functional

from infinity.cli.console import Step
from infinity.comm.communicator import Communicator
from infinity.comm.groups import destroy_group, duplicate_group
from infinity.config import Config
from infinity.errors import RanksError
from infinity.plan.formats import state_format
from infinity.plan.layout import SHARD_ALIGNMENT, Slot, UnitLayout
from infinity.rules import Hyper
from infinity.tiers.available import available_memory, cache_bytes
from infinity.tiers.device import Device
from infinity.tiers.memory import PAGE, first_touch, host_tensor
from infinity.tiers.transfer import DONE, Transfer
from infinity.update.kernels import update_run

Rate = Callable[[float], float]
"""Works for about that many seconds. Returns the bytes, or FLOP, of a second."""

ROUNDS, FEWEST_ROUNDS = 7, 3
_SHORTEST_TURN = 0.05
_WARM = 0.02
"""Seconds of the calls from which the time of one is estimated."""


class Calls:
    """Rate of equal calls.

    run: issues that many calls and returns when all have ended. amount: bytes, or FLOP, of one call.
    """

    def __init__(self, run: Callable[[int], None], amount: float) -> None:
        self._run, self.amount = run, amount
        run(1)  # touches memory, compiles, connects
        calls, spent = 1, self._seconds(1)
        self.seconds = min(spent, self._seconds(1))
        """Seconds of one call, roughly."""
        while spent < _WARM:
            calls *= 2
            spent = self._seconds(calls)
            self.seconds = spent / calls

    def __call__(self, seconds: float) -> float:
        calls = max(1, round(seconds / self.seconds))
        return calls * self.amount / self._seconds(calls)

    def _seconds(self, calls: int) -> float:
        began = time.perf_counter()
        self._run(calls)
        return time.perf_counter() - began


def measure(
    rates: Mapping[str, Rate], seconds: float, step: Step, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the rates of each kind, one a round, measured for about `seconds` in all.

    Performs up to `ROUNDS` rounds, and at least `FEWEST_ROUNDS` however long they take.
    """
    began = clock()
    rounds = min(ROUNDS, max(FEWEST_ROUNDS, int(seconds / len(rates) / _SHORTEST_TURN)))
    turn = max(0.0, seconds) / len(rates) / rounds
    samples: dict[str, list[float]] = {name: [] for name in rates}
    names = list(rates)
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and clock() - began > seconds - turn * len(names) / 2:
            break
        first = number % len(names)
        for place, name in enumerate([*names[first:], *names[:first]]):
            step((number + place / len(names)) / rounds, f"measuring; {name}, round {number + 1} of {rounds}")
            samples[name].append(rates[name](turn))
    return samples


def unsteady(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the kinds whose rates differ between rounds by more than half of their median."""
    return [name for name, values in samples.items() if max(values) - min(values) > median(values) / 2]


WIDTHS = (512, 1024, 2048, 4096)
"""Widths of a transformer block, ascending."""
_FEW_ROWS = 16
"""Rows of a matmul that the reading of its weight bounds."""
_COPY = 256 << 20
_LEAST_STATES = 512 << 20
_TIMES_CACHES = 4
_PART_OF_MEMORY = 4
"""A measurement takes at most this part of the memory that is free: a quarter."""


def adam(nbytes: int | None = None) -> tuple[Calls, int]:
    """Return the rate of AdamW in the config's default formats, with all processors, and the bytes of its arrays.

    nbytes: by default several times those of all caches. Every byte counts each time the update reads or writes it.
    """
    infinity, hyper = Config().infinity, Hyper()
    states = state_format(torch.bfloat16, infinity.master, hyper.rule, infinity.moments)
    each = states.bytes_per_element + 2 * torch.bfloat16.itemsize  # and the parameter and its gradient
    wanted = nbytes or max(_LEAST_STATES, _TIMES_CACHES * cache_bytes())
    n = max(PAGE, int(min(wanted, available_memory() // _PART_OF_MEMORY) / each) // PAGE * PAGE)
    record, param, grad = (_touched(size) for size in (states.nbytes(n), 2 * n, 2 * n))
    arrays = {name: place.of(record) for name, place in states.ranges(n).items()}
    grad.view(torch.bfloat16).fill_(1e-3)
    steps = count(1)

    def run(calls: int) -> None:
        for _ in range(calls):
            update_run(arrays, param.view(torch.bfloat16), grad.view(torch.bfloat16), hyper, next(steps), 1.0, 0)

    updated = record.nbytes + param.nbytes
    return Calls(run, 2 * updated + grad.nbytes), updated + grad.nbytes


class Copies:
    """The engine's copies between host memory, pinned on CUDA, and a device.

    nbytes: of a copy. Methods issue a number of copies and return when all have ended.
    """

    def __init__(self, device: Device, nbytes: int | None = None) -> None:
        free = min(device.available_bytes(), available_memory()) // _PART_OF_MEMORY
        self.nbytes = nbytes or max(PAGE, min(_COPY, free) // PAGE * PAGE)
        self._device = device
        self.on_device = device.empty(self.nbytes)
        self.host = device.host_buffer(self.nbytes)

    def to_device(self, copies: int) -> None:
        self._copy(copies, self.on_device, self.host)

    def to_host(self, copies: int) -> None:
        self._copy(copies, self.host, self.on_device)

    def _copy(self, copies: int, destination: torch.Tensor, source: torch.Tensor) -> None:
        transfer: Transfer = DONE
        for _ in range(copies):
            transfer = self._device.copy(destination, source)
        transfer.wait()


def matmul(device: Device, dtype: torch.dtype, longest: float) -> tuple[Calls, int] | None:
    """Return the rate of `first_matmul` in FLOP/s and its width; None if the device lacks the dtype.

    The width is the largest in `WIDTHS` with which a call takes about `longest` seconds at most, and a quarter of the
    device's free memory.
    """
    found = None
    for width in WIDTHS:
        too_slow = found is not None and found[0].seconds * (width / found[1]) ** 3 > longest
        too_large = 9 * width**2 * dtype.itemsize > device.available_bytes() // _PART_OF_MEMORY
        if found is not None and (too_slow or too_large):
            break
        try:
            found = Calls(first_matmul(device, dtype, width), 8 * width**3), width
        except NotImplementedError:
            return None
    return found


def few_rows(device: Device, dtype: torch.dtype, width: int) -> Calls:
    """Return the rate in bytes of the weight per second of a matmul of few rows: (16, width) by (width, 4 width)."""
    weight = torch.empty(0, dtype=dtype).itemsize * 4 * width**2
    return Calls(first_matmul(device, dtype, width, rows=_FEW_ROWS), weight)


def first_matmul(device: Device, dtype: torch.dtype, width: int, rows: int | None = None) -> Callable[[int], None]:
    """Return a function that performs a number of matmuls of a block: (rows, width) by (width, 4 width).

    rows: by default `width`.
    """
    shapes = ((rows or width, width), (4 * width, width))
    values, weight = (torch.randn(shape, device=device.torch_device).to(dtype) for shape in shapes)

    def run(calls: int) -> None:
        for _ in range(calls):
            functional.linear(values, weight)
        device.compute_reached().wait()

    return run


def _touched(nbytes: int) -> torch.Tensor:
    memory = host_tensor(nbytes)
    first_touch(memory)
    return memory


_UNIT = 64 << 20


class Gathers:
    """The all-gather of a unit of bf16 parameters. Needs torch's process group. A context manager.

    Rank 0 calls `run`; the other ranks `follow` it until it closes. nbytes: of the gathered unit, rounded up.
    """

    def __init__(self, device: Device, nbytes: int = _UNIT) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._orders = duplicate_group(world, "gloo")
        self._ranks = Communicator(device)
        whole = SHARD_ALIGNMENT * self._ranks.size
        numel = -(-nbytes // torch.bfloat16.itemsize // whole) * whole
        slot = Slot("weight", (numel,), 0, 0)
        self._ranks.set_layouts([UnitLayout(0, "unit", (slot,), torch.bfloat16, True, numel, self._ranks.size)])
        self._flat = device.empty(numel * torch.bfloat16.itemsize).view(torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    @property
    def backend(self) -> str:
        return self._ranks.backend

    def run(self, calls: int) -> None:
        """Perform that many all-gathers with all ranks."""
        self._agree(calls)
        self._gather(calls)

    def follow(self) -> None:
        """Perform what rank 0 runs, until it closes."""
        while calls := self._agree(0):
            self._gather(calls)

    def _gather(self, calls: int) -> None:
        transfer: Transfer = DONE
        for _ in range(calls):
            transfer = self._ranks.all_gather(self._flat, DONE, 0)
        transfer.wait()

    def _agree(self, calls: int) -> int:
        """Return the number of rank 0."""
        order = torch.tensor([calls])
        try:
            dist.broadcast(order, 0, group=self._orders)
        except RuntimeError as error:
            raise RanksError(f"another rank ended: see its output ({error})") from error
        return int(order)

    def close(self) -> None:
        """End the measurement on all ranks."""
        if self._ranks.is_main_rank:
            self._agree(0)
        self._ranks.close()
        destroy_group(self._orders)

    def __enter__(self) -> Gathers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the launcher ends the other ranks, which may wait in a collective.
        if kind is None:
            self.close()

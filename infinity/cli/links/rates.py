"""Rates of host memory, of copies to and from the device, and of matmuls, through the engine's own code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch.nn import functional

from infinity.cli.links.turns import Calls
from infinity.config import Config
from infinity.plan.formats import state_format
from infinity.rules import Hyper
from infinity.tiers.available import available_memory, cache_bytes
from infinity.tiers.device import Device
from infinity.tiers.memory import PAGE, first_touch, host_tensor
from infinity.tiers.transfer import DONE, Transfer
from infinity.update.kernels import update_run

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

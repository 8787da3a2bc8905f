"""The engine in virtual time: its own code on `late.clock`, with host work and waits that take a computed time.

It replaces the threads and locks of the engine's modules, its kernels on the host, which cost the bytes that they
access, and the values that construction writes. Memory is reserved and not touched, so models larger than the machine's
memory run.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from infinity.engine.training_runner import TrainingRunner
from infinity.tiers.accelerator import StreamTransfer
from infinity.tiers.digests import Fingerprint
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import DONE, Transfer, issued
from infinity.units.binding import unbind
from infinity.units.kept import EditCheck, EditChecks
from infinity.units.store import UnitStore
from infinity.units.unit import Unit
from infinity.update.kernels import NATIVE, Kernels
from late import clock, threads
from late.device import LateAccelerator

MAP_NORESERVE = 0x4000
"""Flag of Linux, for which `mmap` has no name."""

FINGERPRINTS, GRADIENTS = "fingerprints", "gradients on device"
"""Names of the engine's own kernels."""


@dataclass(frozen=True)
class Host:
    """The host. memory: bytes a second, for each thread that works on it with all cores. core: bytes a second of the
    one core that adds gradients while an update has all others; 0: gradients have all cores, too. nbytes,
    device_nbytes: sizes of host and device memory.
    """

    memory: float = 150e9
    core: float = 0.0
    nbytes: float = 4e12
    device_nbytes: float = 139 * 2**30


class SimulatedAccelerator(LateAccelerator):
    """Device "late" in virtual time."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        if destination.is_cpu and source.is_cpu:
            if after is not None:
                after.wait()
            clock.clock().work("copy", 2 * source.nbytes / self._host.memory)
            return DONE
        after = None if after is None else issued(after)
        clock.clock().turn()  # threads share the streams of copies
        return super().copy(destination, source, after=after)

    def fingerprint(self, memory: torch.Tensor) -> Fingerprint:
        with clock.clock().label(FINGERPRINTS):
            return super().fingerprint(memory)

    def _memory(self) -> tuple[int, int]:
        return int(self._host.device_nbytes), int(self._host.device_nbytes)


def blank(model: nn.Module) -> nn.Module:
    """Replace a model's parameters on the meta device by ones in memory that nothing touches."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                value = host_tensor(parameter.nbytes).view(parameter.dtype).view(parameter.shape)
                made[parameter] = nn.Parameter(value, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[parameter]
    return model


@contextmanager
def simulated(host: Host) -> Iterator[SimulatedAccelerator]:
    """Let engines of the block, around models of `blank`, run in virtual time. `late.clock.start` comes before."""
    mapping = SimpleNamespace(**{name: getattr(mmap, name) for name in dir(mmap)})
    mapping.MAP_PRIVATE |= MAP_NORESERVE
    replaced: dict[str, Any] = {
        "infinity.concurrency._Present.primitives": threads.Primitives(),  # autograd has threads of its own, too
        "infinity.tiers.memory.mmap": mapping,
        "infinity.tiers.slab.first_touch": lambda memory: None,
        "infinity.tiers.open_tiers.available_memory": lambda: int(host.nbytes),
        "infinity.tiers.accelerator.fingerprint_on_device": _fingerprint,
        "infinity.engine.platform.stream_in": _stream_in,
        "infinity.engine.platform.Machine.kernels": _kernels(host),
    }
    replaced |= {
        "infinity.tiers.accelerator.StreamTransfer.wait": _stream_wait,
        "infinity.tiers.accelerator.StreamTransfer.done": _stream_done,
    }
    replaced["infinity.units.store.UnitStore._was_edited"] = _was_edited
    replaced["infinity.units.store.EditChecks"] = _Unedited
    for name in ("arrived", "end_backward"):
        replaced[f"infinity.engine.training_runner.TrainingRunner.{name}"] = _labelled(getattr(TrainingRunner, name))
    with _patched(replaced):
        yield SimulatedAccelerator(host)


@contextmanager
def _patched(replaced: dict[str, Any]) -> Iterator[None]:
    patches = [patch(name, value) for name, value in replaced.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _fingerprint(memory: torch.Tensor) -> torch.Tensor:
    """Cost what CUDA's kernel costs, which reads the memory once."""
    return memory.view(torch.int64).sum()


class _Unedited(EditChecks):
    """Comparisons that cost what they cost. Nothing is edited, and nothing computes the flags."""

    def start(self, unit: Unit) -> EditCheck:
        with clock.clock().label(FINGERPRINTS):
            check = super().start(unit)
        assert check.same is not None
        return replace(check, flag=torch.ones(1, dtype=torch.uint8))


_store_was_edited = UnitStore._was_edited
_stream_is_done = StreamTransfer.done
_wait_for_stream = StreamTransfer.wait


def _labelled(method: Callable[..., Any]) -> Callable[..., Any]:
    def labelled(*arguments: Any) -> Any:
        with clock.clock().label(GRADIENTS):
            return method(*arguments)

    return labelled


def _was_edited(store: UnitStore, unit: Unit) -> bool:
    began = clock.clock().now
    with clock.clock().label(FINGERPRINTS):
        edited = _store_was_edited(store, unit)
    clock.clock().note_site(began)
    return edited


def _stream_done(transfer: StreamTransfer) -> bool:
    clock.clock().turn()
    return _stream_is_done(transfer)


def _stream_wait(transfer: StreamTransfer) -> None:
    began = clock.clock().now
    _wait_for_stream(transfer)
    clock.clock().note_site(began)
    clock.clock().turn()


def _stream_in(
    model: nn.Module, found: Sequence[Any], layouts: Sequence[Any], states: Any, ranks: Any, device: torch.device
) -> list[Unit]:
    """Make released units, without writing values to their tiers."""
    units = []
    for members, layout in zip(found, layouts, strict=True):
        units.append(Unit(layout, list(members.parameters), device))
        unbind(units[-1])
    return units


class _Pool:
    """The pool of threads that update and sum. Workers join the oldest job, so an update keeps them until it ends."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._update = (0.0, 0.0)
        """Begin and end of the present or last update."""

    def update(self, nbytes: float) -> None:
        seconds = nbytes / self._host.memory
        self._update = clock.clock().now, clock.clock().now + seconds
        clock.clock().work("update", seconds)

    def gradient(self, name: str, nbytes: float) -> None:
        rate = self._host.memory
        if self._host.core:
            clock.clock().turn()  # an update that begins before has noted its times
            began, ended = self._update
            rate = self._host.core if began <= clock.clock().now < ended else rate
        clock.clock().work(name, nbytes / rate)


def _kernels(host: Host) -> Kernels:
    pool = _Pool(host)
    return replace(
        NATIVE,
        update_run=_update(pool),
        receive=_receive(pool),
        sum_of_squares=_sum_of_squares(pool),
        check_on_device=lambda *states: None,
        is_exact=lambda kind: True,
    )


def _update(pool: _Pool) -> Callable[..., None]:
    def update(
        states: dict[str, torch.Tensor], param: torch.Tensor, grad: torch.Tensor, *rest: Any, **more: Any
    ) -> None:
        if not param.is_cpu:
            return _update_on_device(states, param, grad)
        # States are read and written, gradients read. Parameters beside fp32 masters are only written.
        read = sum(state.nbytes for state in states.values()) + grad.nbytes
        written = sum(state.nbytes for state in states.values()) + param.nbytes
        read += 0 if "master" in states else param.nbytes
        pool.update(read + written)

    return update


def _update_on_device(states: dict[str, torch.Tensor], param: torch.Tensor, grad: torch.Tensor) -> None:
    """Cost what CUDA's kernel costs: the bytes that it reads and writes."""
    for memory in (*states.values(), param):
        memory.view(torch.uint8).bitwise_not_()
    grad.view(torch.uint8).sum()


def _receive(pool: _Pool) -> Any:
    def receive(target: torch.Tensor, source: torch.Tensor, *, add: bool, **more: Any) -> float:
        pool.gradient("gradient", source.nbytes + (2 if add else 1) * target.nbytes)
        return 1.0

    return receive


def _sum_of_squares(pool: _Pool) -> Any:
    def sum_of_squares(values: torch.Tensor, **more: Any) -> float:
        pool.gradient("norm", values.nbytes)
        return 1.0

    return sum_of_squares

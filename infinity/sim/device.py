"""Devices whose memory is torch's meta device, so that nothing is allocated or computed, and whose work takes time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from infinity.observe.ledger import Waits
from infinity.observe.recorder import Recorder
from infinity.plan.frozen import FrozenCode
from infinity.plan.policy import DeviceInfo
from infinity.sim.clock import FOREGROUND, Clock, Record, lane_of
from infinity.sim.lanes import Stream
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.digests import Fingerprint
from infinity.tiers.headroom import Headroom, Planned
from infinity.tiers.transfer import DONE, Fingerprinted, Transfer
from infinity.units.compiled import outside_modes

META = torch.device("meta")
_HOST = CpuDevice()


class _Fingerprint:
    """A fingerprint on the device."""

    __slots__ = ("_value",)
    __hash__ = object.__hash__

    def __init__(self) -> None:
        self._value = torch.empty((), dtype=torch.int64, device=META)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, _Fingerprint):
            return NotImplemented
        if torch._C._len_torch_dispatch_stack():
            return self._value == other._value
        return _EQUAL  # nothing times the operation, and torch's meta kernel is slow

    def __ne__(self, other: object) -> Any:
        return self._value != other._value if isinstance(other, _Fingerprint) else NotImplemented


_EQUAL = torch.empty((), dtype=torch.bool, device=META)


@dataclass(frozen=True)
class DeviceFacts:
    """The device to simulate. By default the host computes."""

    host_addressable: bool = True
    """True: the host computes, in its own memory."""
    nbytes: int = 0
    """Bytes of the device's own memory."""
    bandwidth: float | None = None
    """Bytes/s of the device's own memory; None: operations other than matrix products take no time there."""
    processors: int = 1
    """Processors of the host."""


class Times(Protocol):
    """Times of operations and of the engine's kernels that are known by other means than from bandwidths."""

    def seconds(
        self, key: Hashable, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, expected: float
    ) -> float | None:
        """Return the seconds of a call with tensors of these shapes; None if they are not known.

        key: equal for calls of equal times. args, kwargs, result: tensors are on the meta device. expected: seconds, by
        the bandwidths.
        """


class _Waits(Waits):
    """Waits, and the time for which the model's compute stood still meanwhile."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._still: dict[str, float] = {}

    def begin(self) -> Any:
        return super().begin(), self._device.position()[0]

    def end(self, began: Any, reason: str) -> Any:
        self._still[reason] = self._still.get(reason, 0.0) + self._device.position()[0] - began[1]
        return super().end(began[0], reason)

    def _stood_still(self) -> dict[str, float]:
        return self._still


class _Recorder(Recorder):
    """Lets the model's thread spend the time of Python for each use of a unit."""

    def __init__(self, clock: Clock, device: SimulatedDevice, seconds: float) -> None:
        super().__init__(waits=_Waits(device), on_host=device.host_addressable)
        self._clock, self._seconds = clock, seconds

    def unit(self, name: str) -> None:
        self._clock.spend(self._seconds)


class SimulatedDevice(Device):
    """Base of both kinds. Memory of host and device differs by the buffer that allocated it."""

    torch_device = host = META
    modes = 1  # `infinity.sim.compute.Compute`

    times: Times | None = None
    """Times on this device; None: all follow from bandwidths."""

    def __init__(self, clock: Clock, facts: DeviceFacts, memory: float, unit_overhead: float = 0.0) -> None:
        """memory: bytes/s of host memory, by all processors. unit_overhead: see `Links`."""
        self._clock = clock
        self._unit_overhead = unit_overhead
        self._facts = facts
        self._memory = memory
        self._of_host: dict[int, torch.UntypedStorage] = {}
        """Storages of host memory. They stay alive, so that no other storage has their identity."""

    @cached_property
    def recorder(self) -> Recorder:
        return _Recorder(self._clock, self, self._unit_overhead)

    def like_this_thread(self) -> AbstractContextManager[object]:
        return _entering([*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()])

    @property
    def info(self) -> DeviceInfo:
        facts = self._facts
        kind = "cpu" if facts.host_addressable else "cuda"
        return DeviceInfo(kind, facts.host_addressable, facts.nbytes, processors=facts.processors)

    def empty(self, nbytes: int) -> torch.Tensor:
        with outside_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        buffer = self.empty(nbytes)
        storage = buffer.untyped_storage()
        self._of_host[storage._cdata] = storage
        return buffer

    def in_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in a buffer of `host_buffer`."""
        return tensor.untyped_storage()._cdata in self._of_host

    def work_on_host(self, lane: str, seconds: float, pool: str = "") -> None:
        """Let the calling thread work for `seconds` on the host's processors. pool: of the native kernels."""
        self._clock.work(lane, seconds, pool=pool)

    def host_seconds(self, nbytes: float, function: Callable[..., Any], *args: Any) -> float:
        """Return the seconds of a kernel that reads and writes `nbytes` of host memory. args: on the meta device; other
        arguments than tensors do not change the time.
        """
        seconds = nbytes / self._memory
        if self.times is None:
            return seconds
        tensors = (each for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        key = function, tuple((each.shape, each.stride(), each.dtype) for each in tensors)
        known = self.times.seconds(key, function, args, {}, None, seconds)
        return seconds if known is None else known

    def numbers(self, memory: torch.Tensor) -> list[Any]:
        # Squares are so small that no gradient is clipped; flags say that nothing was edited.
        return [1e-30 if memory.is_floating_point() else 1] * memory.numel()

    def poison(self, buffer: torch.Tensor) -> None:
        """Released buffers hold nothing."""

    def headroom(self, planned: Planned) -> Headroom:
        return Headroom(watches=False)  # no memory is taken

    def available_bytes(self) -> int:
        return self._facts.nbytes

    def operate(self, seconds: float, nbytes: float) -> None:
        """Let the calling thread's compute take the time of an operation. seconds: of its arithmetic. nbytes: read and
        written.
        """
        raise NotImplementedError

    def position(self) -> tuple[float, Record | None]:
        """Return when compute that the model issues now would start, and the work that determines it."""
        raise NotImplementedError


@contextmanager
def _entering(modes: Sequence[TorchDispatchMode | TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        yield


class SimulatedHost(SimulatedDevice):
    """The host computes."""

    host_addressable = True
    function_modes = 1  # `infinity.sim.compute.AsOnHost`

    def __init__(
        self, clock: Clock, facts: DeviceFacts, memory: float, times: Times | None, unit_overhead: float = 0.0
    ) -> None:
        super().__init__(clock, facts, memory, unit_overhead)
        self.times = times

    def is_host(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        self._copy(torch.Tensor.copy_, destination, source)
        return DONE

    def copy_parameters(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        self._copy(_HOST.copy_parameters, destination, source)
        return Fingerprinted(0)

    def _copy(self, function: Callable[..., Any], destination: torch.Tensor, source: torch.Tensor) -> None:
        """Take the time of `function`, a copy."""
        lane = lane_of(self._clock.current.name)
        if lane != "activations" and self.in_host_memory(source) != self.in_host_memory(destination):
            lane = "host_to_device" if self.in_host_memory(source) else "device_to_host"
        nbytes = destination.numel()
        seconds = self.host_seconds(2 * nbytes, function, destination, source)
        self._clock.submitted.append(self._clock.work(lane, seconds, nbytes=nbytes))

    def decode_parameters(self, code: FrozenCode, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self.decode(code, destination, DONE)

    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        after.wait()
        moved = code.records_nbytes(code.numel(memory)) + memory.numel()
        self.work_on_host(lane_of(self._clock.current.name), moved / self._memory, FOREGROUND)
        return Fingerprinted(0)

    def await_copy(self, transfer: Transfer) -> None:
        transfer.wait()

    def fingerprint(self, memory: torch.Tensor) -> Fingerprint:
        seconds = self.host_seconds(memory.numel(), _HOST.fingerprint, memory)
        self._clock.work("compute", seconds, "fingerprint")
        return 0

    def operate(self, seconds: float, nbytes: float) -> None:
        self._clock.current.debt += max(seconds, nbytes / self._memory)

    def position(self) -> tuple[float, Record | None]:
        return self._clock.now, self._clock.current.last


class SimulatedAccelerator(SimulatedDevice):
    """A device with memory, streams of copies, and a stream of each thread."""

    host_addressable = False

    def __init__(
        self,
        clock: Clock,
        facts: DeviceFacts,
        memory: float,
        to_device: float,
        from_device: float,
        *,
        launch: float = 0.0,
        unit_overhead: float = 0.0,
    ) -> None:
        """to_device, from_device: bytes/s of copies. launch: seconds in which a thread issues a kernel or a copy."""
        super().__init__(clock, facts, memory, unit_overhead)
        self._launch = launch
        self._to, self._from = Stream(clock, "host_to_device"), Stream(clock, "device_to_host")
        self._bandwidths = {self._to: to_device, self._from: from_device}
        self._streams: dict[str, Stream] = {}
        """Thread → its stream."""

    @property
    def stream(self) -> Stream:
        """The calling thread's stream."""
        name = self._clock.current.name
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = Stream(self._clock, lane_of(name))
        return stream

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.in_host_memory(tensor)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        to_host, from_host = self.in_host_memory(destination), self.in_host_memory(source)
        nbytes = destination.numel()
        if to_host and from_host:
            if after is not None:
                after.wait()
            self.work_on_host(lane_of(self._clock.current.name), 2 * nbytes / self._memory)
            return DONE
        stream = self._from if to_host else self._to
        stream.follow(self.stream.reached() if after is None else after)
        self._clock.spend(self._launch)
        self._clock.turn()  # threads share the streams of copies
        lane, processors = self._clock.current.lane, self._clock.processors
        if to_host or from_host:
            seconds, rate = nbytes / self._bandwidths[stream], self._bandwidths[stream] / self._memory
            record = stream.run(processors.copy_seconds(seconds, rate, stream.join()[0]), lane, nbytes=nbytes)
            processors.add_copy(record, seconds * rate)
        else:
            record = stream.run(self._seconds(2 * nbytes), lane, nbytes=nbytes)
        self._clock.submitted.append(record)
        return stream.reached()

    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        self._to.follow(after)
        self._clock.spend(self._launch)
        moved = code.records_nbytes(code.numel(memory)) + memory.numel()
        self._to.run(self._seconds(moved), self._clock.current.lane)
        return self._to.reached()

    def await_copy(self, transfer: Transfer) -> None:
        with self.recorder.wait("gather", "parameters"):
            self.stream.follow(transfer)

    def copy_result(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        self.operate(0.0, 2 * source.nbytes)  # a kernel stores it
        return self.stream.reached()

    def compute_reached(self) -> Transfer:
        return self.stream.reached()

    def fingerprint(self, memory: torch.Tensor) -> Fingerprint:
        with self._clock.naming("fingerprint"):
            self.operate(0.0, memory.numel())
        found: Any = _Fingerprint()
        return found  # type: ignore[no-any-return]

    def operate(self, seconds: float, nbytes: float) -> None:
        self._clock.spend(self._launch)
        self.stream.run(max(seconds, self._seconds(nbytes)))

    def position(self) -> tuple[float, Record | None]:
        return self.stream.join()

    def _seconds(self, nbytes: float) -> float:
        return 0.0 if self._facts.bandwidth is None else nbytes / self._facts.bandwidth

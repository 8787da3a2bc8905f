"""A device with memory and streams of its own: CUDA, ROCm or XPU, through torch's generic streams and events.

CUDA's alone are the registration of host memory (`infinity.tiers.memory`) and the optimizer kernels
(`infinity.optim.cuda_adam`).

Results of a CUDA device for the host, a few bytes each.

A copy would queue behind gradients: copies to the host take turns in the order of all streams, and a unit's gradient
takes milliseconds. A kernel writes to registered memory at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial

import torch

from infinity.concurrency import now
from infinity.inputs import number_of
from infinity.native import cuda
from infinity.observe.log import logger
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Stamp
from infinity.plan.frozen import FrozenCode
from infinity.plan.policy import DeviceInfo
from infinity.tiers import frozen
from infinity.tiers.available import available_memory, update_processors
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.digests import Fingerprint, fingerprint_on_device
from infinity.tiers.memory import host_tensor, pin_ranges
from infinity.tiers.stalls import EventClock, StreamWaits
from infinity.tiers.transfer import DONE, Transfer, issued


class StreamTransfer:
    """Work on a stream, up to an event."""

    def __init__(self, stream: torch.Stream) -> None:
        self.event = torch.Event(stream.device)
        self.event.record(stream)
        self._device = stream.device

    def wait(self) -> None:
        # Most transfers have ended when they are waited for, and a query needs no event that blocks.
        if self._device.type != "cuda":
            self.event.synchronize()
        elif not _ends_soon(self.event):
            _sleep_until(self.event, self._device)

    def done(self) -> bool:
        return bool(self.event.query())


class _Waits(threading.local):
    """Streams of a thread for its waits, by device."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


_waits = _Waits()


_POLLED = 25e-6
"""Seconds for which a thread polls an event before it sleeps: less than the event, stream and interrupt of a sleep."""


def _ends_soon(event: torch.Event) -> bool:
    """Poll `event` for a short time. Returns whether it has ended."""
    until = now() + _POLLED
    while not event.query():
        if now() >= until:
            return False
    return True


def _sleep_until(event: torch.Event, device: torch.device) -> None:
    """Wait for `event` of a CUDA stream without a busy core, which the optimizer's threads need.

    `torch.Event` ignores `blocking` (torch 2.6 to 2.13), and CUDA's default wait spins. An event of `torch.cuda` can
    block, but streams and events of the two kinds do not mix. So it follows `event` on a stream that nothing else uses.
    """
    stream = _waits.streams.get(device)
    if stream is None:  # with priority, from another pool than the streams of the engine and of NCCL
        stream = _waits.streams[device] = torch.cuda.Stream(device, priority=-1)
    event.wait(stream)
    reached = torch.cuda.Event(blocking=True)
    reached.record(stream)
    reached.synchronize()


class AcceleratorDevice(Device):
    """Accelerator with one stream for copies to it, one for copies from it, and one for each helper thread."""

    host_addressable = False

    def __init__(self, device: torch.device) -> None:
        """device: with an index. It becomes the calling thread's current device."""
        self.torch_device = device
        torch.accelerator.set_device_index(device)
        self._to_device = torch.Stream(device)
        self._from_device = torch.Stream(device)
        self._helper = threading.local()
        self._model_stream: torch.Stream | None = None
        """The stream on which a model's thread computed last."""
        self._clock = EventClock()
        self._library = torch.get_device_module(device)
        self._fraction: float | None = None
        """Share of the memory that torch could allocate before `limit`; None: no limit is set."""

    @cached_property
    def recorder(self) -> Recorder:
        waits = StreamWaits(self.torch_device, self._clock)
        return Recorder(self.stamp, lambda: self._clock.calibrate(self._current_stream()), waits, on_host=False)

    def stamp(self) -> Stamp:
        return self._clock.stamp(self._current_stream())

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self.torch_device)
        self._helper.stream = torch.Stream(self.torch_device)
        torch.accelerator.set_stream(self._helper.stream)

    def like_this_thread(self) -> AbstractContextManager[object]:
        return _current(torch.accelerator.current_stream(self.torch_device))

    def follow_compute(self) -> None:
        self._current_stream()

    def finish(self) -> None:
        # Fetches ahead may be under way, into buffers that are about to be freed.
        for stream in (self._to_device, self._from_device, self._model_stream):
            if stream is not None:  # the model's stream may store a result
                StreamTransfer(stream).wait()

    def _current_stream(self) -> torch.Stream:
        """Return the calling thread's stream; a model's stream follows the one that a model's thread used before."""
        own: torch.Stream | None = getattr(self._helper, "stream", None)
        if own is not None:
            return own
        stream = torch.accelerator.current_stream(self.torch_device)
        before, self._model_stream = self._model_stream, stream
        # A user may change streams between two calls. Units that the former stream uses would be moved under it.
        if before is not None and before != stream:
            stream.wait_stream(before)
        return stream

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        return host_tensor(nbytes, pin=pin and self.torch_device.type == "cuda")

    def pin(self, memory: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        if self.torch_device.type == "cuda":
            pin_ranges(memory, ranges)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        if destination.is_cpu and source.is_cpu:
            # No stream orders a copy of the host's.
            if after is not None:
                after.wait()
            destination.copy_(source)
            return DONE
        stream = self._from_device if destination.is_cpu else self._to_device
        # Compute that is queued may still use the buffers.
        _follow(stream, StreamTransfer(self._current_stream()) if after is None else after)
        lane = "device_to_host" if destination.is_cpu else "host_to_device" if source.is_cpu else ""
        with _current(stream), self.recorder.copy(lane, destination.nbytes, partial(self._clock.stamp, stream)):
            destination.copy_(source, non_blocking=True)
        return StreamTransfer(stream)

    def copy_result(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        if source.is_cuda and cuda.available() and destination.is_pinned():
            import infinity.native._adam_cuda as native

            where = {"device": source.get_device(), "stream": torch.cuda.current_stream(source.device).cuda_stream}
            native.store(source.data_ptr(), destination.data_ptr(), source.numel(), **where)
            return self.compute_reached()
        return self.copy(destination, source)

    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        # On the stream of the copy, which it follows without a wait.
        _follow(self._to_device, after)
        with _current(self._to_device):
            frozen.decode_on_device(code, memory)
        return StreamTransfer(self._to_device)

    def await_copy(self, transfer: Transfer) -> None:
        with self.recorder.wait("gather", "parameters"):
            stream, transfer = self._current_stream(), issued(transfer)
            if not isinstance(transfer, StreamTransfer):
                transfer.wait()
            # An event that has ended needs no entry in the model's stream.
            elif hasattr(self._helper, "stream") or not transfer.event.query():
                stream.wait_event(transfer.event)

    def compute_reached(self) -> Transfer:
        return StreamTransfer(self._current_stream())

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.fill_(0xFF)
        if not buffer.is_cpu and hasattr(self._helper, "stream"):
            self.compute_reached().wait()  # a model's thread uses the buffer next, on another stream

    def fingerprint(self, memory: torch.Tensor) -> Fingerprint:
        self._current_stream()
        return fingerprint_on_device(memory)

    @property
    def info(self) -> DeviceInfo:
        processors = update_processors(feeding=True)
        return DeviceInfo(self.torch_device.type, self.host_addressable, self._memory()[1], processors=processors)

    def unused_bytes(self, limit: int) -> int:
        taken, peak = (
            int(read(self.torch_device))
            for read in (torch.accelerator.memory_reserved, torch.accelerator.max_memory_reserved)
        )
        left = self._memory()[0] - (peak - taken)
        return max(0, min(left, limit - peak) if limit else left)

    def available_bytes(self) -> int:
        reserved, allocated = (getattr(self._library, f"memory_{kind}", None) for kind in ("reserved", "allocated"))
        if reserved is None or allocated is None:
            return self._memory()[0]
        # torch keeps freed memory for its next allocations.
        return self._memory()[0] + int(reserved(self.torch_device) - allocated(self.torch_device))

    def limit(self, nbytes: int) -> None:
        total = self._memory()[1]
        if nbytes >= total:
            return
        restrict = getattr(self._library, "set_per_process_memory_fraction", None)
        if restrict is None:
            kind = self.torch_device.type
            logger.warning("torch cannot limit memory on %s: infinity.memory.device limits buffers only", kind)
            return
        if self._fraction is None:
            present = getattr(self._library, "get_per_process_memory_fraction", None)  # some lack it
            self._fraction = 1.0 if present is None else present(self.torch_device)
        restrict(nbytes / total, self.torch_device)

    def lift_limit(self) -> None:
        if self._fraction is not None:
            fraction, self._fraction = self._fraction, None
            self._library.set_per_process_memory_fraction(fraction, self.torch_device)

    def _memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device, or the host's if torch has no query for them."""
        query = getattr(self._library, "mem_get_info", None)
        if query is None:
            return available_memory(), available_memory()
        free, total = query(self.torch_device)
        return int(free), int(total)

    def peak_bytes(self) -> int:
        peak = getattr(self._library, "max_memory_allocated", None)
        return int(peak(self.torch_device)) if peak is not None else 0


def _follow(stream: torch.Stream, transfer: Transfer) -> None:
    """Make work issued to `stream` from now on start after `transfer`. Waits for the part of background threads."""
    transfer = issued(transfer)
    if isinstance(transfer, StreamTransfer):
        stream.wait_event(transfer.event)
    else:
        transfer.wait()


@contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def default_device() -> Device:
    """Return this rank's accelerator (LOCAL_RANK of torchrun, else torch's current one); without one, the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":  # MPS has no streams
        return CpuDevice()
    index = torch.accelerator.current_device_index()
    if "LOCAL_RANK" in os.environ:
        index = number_of("LOCAL_RANK", 0) % torch.accelerator.device_count()
    return AcceleratorDevice(torch.device(accelerator.type, index))

"""The engine's device on "late": streams for copies and pinned host buffers, as `CudaDevice` has on CUDA."""

from __future__ import annotations

from functools import partial

import torch

import late
from infinity.tiers.device import Device, fingerprint_by_torch
from infinity.tiers.memory import before_unmapping, host_tensor
from infinity.tiers.transfer import Transfer


class StreamTransfer:
    """Transfer that is done when `event` is."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())


class LateAccelerator(Device):
    """Device "late" with one stream for copies to it and one for copies from it."""

    host_addressable = False

    def __init__(self, index: int = 0) -> None:
        late.load()
        self.torch_device = torch.device("late", index)
        self._to_device = torch.Stream(self.torch_device)
        self._from_device = torch.Stream(self.torch_device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        buffer = host_tensor(nbytes)
        if pin and nbytes > 0:
            late.pin(buffer.data_ptr(), nbytes)
            before_unmapping(buffer, partial(late.unpin, buffer.data_ptr()))
        return buffer

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        stream = self._from_device if self.is_host(destination) else self._to_device
        if isinstance(after, StreamTransfer):
            stream.wait_event(after.event)
        else:
            stream.wait_stream(torch.accelerator.current_stream(self.torch_device))
        with stream:
            destination.copy_(source, non_blocking=True)
            return StreamTransfer(stream.record_event())

    def await_copy(self, transfer: Transfer) -> None:
        if isinstance(transfer, StreamTransfer):
            torch.accelerator.current_stream(self.torch_device).wait_event(transfer.event)
        else:
            transfer.wait()

    def compute_reached(self) -> Transfer:
        return StreamTransfer(torch.accelerator.current_stream(self.torch_device).record_event())

    def fingerprint(self, memory: torch.Tensor) -> int:
        return fingerprint_by_torch(memory)

    def available_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.torch_device)[0])

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

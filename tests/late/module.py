"""`torch.late`: the functions that torch looks for in the module of a device, as `torch.cuda` is CUDA's."""

from __future__ import annotations

from types import TracebackType

import torch

DEVICES = 2
Stream = torch.Stream
Event = torch.Event


class device:
    """Context in which `device` is this thread's current device."""

    def __init__(self, device: torch.device | int | str | None) -> None:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        self._index = current_device() if index is None else index

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_device(self._previous)


class stream:
    """Context in which a stream is this thread's current one, as `torch.cuda.stream`."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._previous = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.accelerator.set_stream(self._previous)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing is left to do. torch 2.11 synchronizes a device only if it has called this."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(index: int) -> None:
    torch.accelerator.set_device_index(index)


def synchronize(device: torch.device | int | None = None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device: torch.device | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


# Random numbers are the CPU's.


def get_rng_state(device: torch.device | int | str | None = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | int | str | None = None) -> None:
    torch.set_rng_state(state)


def manual_seed_all(seed: int) -> None:
    """The CPU's generator is seeded by torch.manual_seed already."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]

"""The device interface: memory for compute, copies to and from it, and synchronisation of compute with copies.

`CpuDevice` computes in host memory, so tiers read directly into its buffers. `AcceleratorDevice`
(`infinity.tiers.accelerator`) copies on streams of its own. The tests add a device with separate memory whose copies
complete late.

Which copy and kernel waits for what: [Note: order on a device].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from infinity.concurrency import now
from infinity.native import _adam
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Stamp
from infinity.plan.frozen import FrozenCode
from infinity.plan.policy import DeviceInfo
from infinity.tiers import frozen
from infinity.tiers.available import available_memory, update_processors
from infinity.tiers.digests import Fingerprint
from infinity.tiers.headroom import Headroom, Planned
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import DONE, Fingerprinted, Transfer


class Device(ABC):
    """Device that the model computes on."""

    torch_device: torch.device
    host = torch.device("cpu")
    """Device of torch whose tensors are in host memory."""
    host_addressable: bool
    """True if the host's I/O and optimizer kernels can work in the device's buffers directly."""

    @cached_property
    def recorder(self) -> Recorder:
        """Records the work of this device's engine, if asked to."""
        return Recorder()

    def stamp(self) -> Stamp:
        """Return the time at which the compute issued so far by this thread ends."""
        return now()

    @property
    def info(self) -> DeviceInfo:
        """Return the properties of the device that a plan depends on."""
        processors = update_processors(feeding=False)
        return DeviceInfo(self.torch_device.type, self.host_addressable, processors=processors)

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor (nbytes,) on the device, with storage of its own."""

    def enter_thread(self) -> None:  # noqa: B027 - the host needs nothing
        """Prepare a helper thread of the engine: the device becomes current, with a stream of the thread's own."""

    modes = 0
    """Number of dispatch modes in which the model computes on this device."""
    function_modes = 0
    """Number of function modes in which it does."""

    def like_this_thread(self) -> AbstractContextManager[object]:
        """Return a context in which another thread computes as the calling one: on its stream, in its modes."""
        return nullcontext()

    def follow_compute(self) -> None:  # noqa: B027 - compute in host memory is in order
        """Order compute that the model's threads issue from now on after all of theirs so far, on any stream."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Copy bytes in any direction between host and device. Copies within host memory are done on return.

        Starts after the compute issued so far by this thread, or after `after` if another thread issued the compute
        that last used the buffers.
        """

    def copy_result(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy a few bytes that this thread computed to the host. With CUDA's kernels it overtakes queued copies."""
        return self.copy(destination, source)

    def copy_parameters(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy parameters from a tier, uint8 (n,), n a multiple of 8. Within host memory, returns `Fingerprinted`."""
        return self.copy(destination, source)

    def decode_parameters(self, code: FrozenCode, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Decode an extent of parameters in memory, `source`, into `destination`: uint8. Within host memory, returns
        `Fingerprinted`.
        """
        return self.decode(code, destination, self.copy(code.stored_in(destination), source))

    @abstractmethod
    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        """Decode the extent that `after` brings to the end of `memory`, uint8, in place. In host memory, waits for
        `after` and returns `Fingerprinted`.
        """

    @abstractmethod
    def await_copy(self, transfer: Transfer) -> None:
        """Make compute issued from now on wait for `transfer`."""

    def compute_reached(self) -> Transfer:
        """Return a transfer that is done when the compute issued so far by this thread has ended."""
        return DONE

    def fingerprint(self, memory: torch.Tensor) -> Fingerprint:
        """Return a 64-bit hash of `memory`, uint8 (n,), n a multiple of 8. It misses a change with probability 2^-64.

        It includes the compute that this thread issued so far. A result on the device does not wait for that compute;
        the comparison of two results does.
        """
        return _adam.fingerprint(memory.data_ptr(), memory.numel())

    def poison(self, buffer: torch.Tensor) -> None:
        """Fill a released buffer with 0xFF, which is NaN in every float format."""
        buffer.fill_(0xFF)

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the host's I/O and optimizer kernels can work in `tensor` directly."""
        return tensor.device.type == "cpu"

    def numbers(self, memory: torch.Tensor) -> list[Any]:
        """Return the numbers in host memory, (n,), that was copied from this device."""
        found: list[Any] = memory.tolist()
        return found

    def peak_bytes(self) -> int:
        """Return the peak of bytes allocated on the device; 0 if the device is the host."""
        return 0

    def unused_bytes(self, limit: int) -> int:
        """Return the bytes that torch has never taken of `limit` bytes of the device's memory, or of all free memory if
        `limit` is 0; 0 if the device is the host.
        """
        return 0

    def available_bytes(self) -> int:
        """Return the bytes that can still be allocated on the device."""
        return available_memory()

    def headroom(self, planned: Planned) -> Headroom:
        """Return the watch of host memory while a model runs."""
        return Headroom(planned)

    def finish(self) -> None:  # noqa: B027 - copies of the host are done on return
        """Wait for all copies that were issued. Their memory may be freed or reused afterwards."""

    def limit(self, nbytes: int) -> None:  # noqa: B027 - nothing limits the host
        """Let torch allocate at most `nbytes` of the device's memory, until `lift_limit`."""

    def lift_limit(self) -> None:  # noqa: B027 - nothing limits the host
        """Restore the limit of before `limit`. Idempotent."""

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        """Return host memory, uint8 (nbytes,), for copies to and from this device; pinned if `pin` and useful."""
        return host_tensor(nbytes)

    def pin(self, memory: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - the host copies
        """Pin bytes [start, stop) of `memory`, an unpinned `host_buffer`, if that is useful. ranges: ascending."""


_PAST_CACHES = 4 << 20
"""Bytes from which `_adam.copy` writes past the caches."""


def _are_words(memory: torch.Tensor) -> bool:
    """Return whether `memory` is bytes in whole words of 8, at an address of a word."""
    whole = not (memory.numel() | memory.data_ptr()) % 8
    return whole and memory.dtype == torch.uint8 and memory.is_contiguous()


class CpuDevice(Device):
    """Device whose memory is the host's."""

    torch_device = torch.device("cpu")
    host_addressable = True

    def empty(self, nbytes: int) -> torch.Tensor:
        return host_tensor(nbytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        with self.recorder.copy("", destination.nbytes):
            # Past the caches, a copy takes little more than half of the time of torch's.
            if destination.nbytes >= _PAST_CACHES and _are_words(destination) and _are_words(source):
                _adam.copy(source.data_ptr(), destination.data_ptr(), source.numel())
            else:
                destination.copy_(source)
        return DONE

    def copy_parameters(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        # One pass for both, as a second one would read memory again [Note: edits without a version].
        with self.recorder.copy("", destination.nbytes):
            return Fingerprinted(_adam.copy(source.data_ptr(), destination.data_ptr(), destination.numel()))

    def decode_parameters(self, code: FrozenCode, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        with self.recorder.copy("", destination.nbytes):
            return Fingerprinted(frozen.decode(code, source, destination))

    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        after.wait()
        return self.decode_parameters(code, memory, code.stored_in(memory))

    def await_copy(self, transfer: Transfer) -> None:
        transfer.wait()

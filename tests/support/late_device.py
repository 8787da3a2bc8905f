"""A device for tests: memory of its own, and copies that complete late.

On a CPU-only machine device and host are the same memory, so a wait that is missing is never missed. Here device memory
is memory that `is_host` denies, a copy fills its destination with NaN when it is issued and with the bytes only when
somebody waits for it, or after a delay that is long for such small models, and each direction is a queue of its own, as
streams are. The bytes are read from the source at that late moment: a source that is reused too early shows as well.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque

import torch

from infinity.plan.frozen import FrozenCode
from infinity.tiers import frozen
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import DONE, Transfer


class LateCopy:
    """One copy in a queue. A wait carries out the copy and those before it in its queue, as on a stream."""

    def __init__(
        self, queue: CopyQueue, destination: torch.Tensor, source: torch.Tensor, after: Transfer | None
    ) -> None:
        self._queue = queue
        self._destination = destination
        self._source = source
        self._after = after
        self._executed = threading.Event()
        self._error: BaseException | None = None
        self.due = time.monotonic() + queue.delay

    def wait(self) -> None:
        self._queue.run_until(self)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._executed.is_set()

    def execute(self) -> None:
        try:
            if self._after is not None:
                self._after.wait()
            with torch.no_grad():
                self._destination.copy_(self._source)
        except BaseException as error:  # noqa: BLE001 - raised by wait
            self._error = error
        # The copy no longer refers to its buffers: pools count who does.
        self._destination = self._source = torch.empty(0)
        self._executed.set()


class CopyQueue:
    """Copies of one direction, in order. A thread carries out those that are due; a waiter does not wait for that."""

    def __init__(self, delay: float, memory: dict[int, torch.Tensor]) -> None:
        self.delay = delay
        # Held by the thread of the queue too: a copy that nobody waited for may outlive its device.
        self._memory = memory
        self.copies = 0
        self.overdue = 0
        """Copies that nobody had waited for when they were due."""
        self._pending: deque[LateCopy] = deque()
        self._turn = threading.Lock()
        self._access = threading.Lock()
        self._watched = False

    def add(self, destination: torch.Tensor, source: torch.Tensor, after: Transfer | None) -> LateCopy:
        with torch.no_grad():
            destination.view(torch.uint8).fill_(0xFF)
        copy = LateCopy(self, destination, source, after)
        with self._access:
            self.copies += 1
            self._pending.append(copy)
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="late-copies", daemon=True).start()
        return copy

    def run_until(self, last: LateCopy) -> None:
        with self._turn:
            while not last.done():
                self._pending[0].execute()
                self._pending.popleft()

    def _watch(self) -> None:
        """Carry out due copies until none is pending."""
        while True:
            with self._access:
                if not self._pending:
                    self._watched = False
                    return
                first = self._pending[0]
            time.sleep(max(0.0, first.due - time.monotonic()))
            if not first.done():
                self.overdue += 1
                self.run_until(first)


class Reached:
    """A point that compute has reached. On the CPU it always has; tests check that it is waited for before buffers are
    reused, as on CUDA streams.
    """

    def __init__(self) -> None:
        self.thread = threading.current_thread().name
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def done(self) -> bool:
        return True


class LateDevice(Device):
    """Computes in CPU tensors that count as device memory; `delay`: seconds after which a copy happens unasked."""

    torch_device = torch.device("cpu")
    host_addressable = False

    def __init__(self, delay: float = 0.05) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self.to_device = CopyQueue(delay, self._memory)
        self.from_device = CopyQueue(delay, self._memory)
        self.reached: list[Reached] = []
        """Every point that `compute_reached` returned."""

    def empty(self, nbytes: int) -> torch.Tensor:
        made = host_tensor(nbytes)
        made.fill_(0xFF)
        # Kept, so that the address is never that of host memory later, and a late copy never meets freed memory.
        self._memory[made.untyped_storage().data_ptr()] = made
        return made

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._memory

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> LateCopy:
        assert destination.dtype == source.dtype == torch.uint8 and destination.numel() == source.numel()
        assert after is not DONE, "a copy after another thread's compute needs the point that this has reached"
        queue = self.from_device if self.is_host(destination) else self.to_device
        return queue.add(self._alias(destination), self._alias(source), after)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a storage of their own: a copy on a stream is no user of device memory either."""
        if self.is_host(tensor) or tensor.numel() == 0:
            return tensor
        memory = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8)

    def decode(self, code: FrozenCode, memory: torch.Tensor, after: Transfer) -> Transfer:
        after.wait()
        frozen.decode_by_torch(code, memory)
        return DONE

    def await_copy(self, transfer: Transfer) -> None:
        transfer.wait()

    def compute_reached(self) -> Reached:
        self.reached.append(Reached())
        return self.reached[-1]

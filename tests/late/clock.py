"""Virtual time on the late device: kernels and copies do not run, and take a computed time.

    rates = Rates(half=500e12, to_device=50e9)
    clock = start(rates)            # for the rest of this process, before anything is allocated on the device
    clock.work("update", 0.01)      # host work of the calling thread

Host threads are those of `late.threads`. One runs at a time: at each call of a lock, queue or future, the one whose
clock is least. So threads meet in the order of their clocks, a poll sees what has ended by then, and every run is the
same. autograd's threads are part of the thread that waits for them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import late


@dataclass(frozen=True)
class Rates:
    """Seconds, and bytes or operations a second, of a device and its link to the host (clock.h)."""

    launch: float = 6e-6
    """Host time of a kernel or a copy, with its share of Python."""
    event: float = 1e-6
    """Host time to record an event or to make a stream wait for one."""
    kernel: float = 3e-6
    """Least duration of a kernel; what a copy takes beside its bytes."""
    device: float = 4e12
    """Bytes of the device's memory."""
    half: float = 500e12
    """Operations of matrix products in 16 bits."""
    single: float = 50e12
    """The same in fp32."""
    to_device: float = 50e9
    from_device: float = 50e9


class _Rates(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_double) for name in Rates.__annotations__)


LANES = ("compute", "to_device", "from_device", "mark", "work", "wait_for_record", "wait_for_thread")
RECORD = np.dtype({
    "names": ("lane", "thread", "name", "stream", "start", "end", "bound"),
    "formats": ("i4", "i4", "i4", "i4", "f8", "f8", "i8"),
})  # fmt: skip


class HostThread:
    """A thread of the host and its clock. It runs while it has the baton."""

    def __init__(self, name: str, index: int, time: float) -> None:
        self.name, self.index, self.time = name, index, time
        self.is_ready = True
        self.label = ""
        self.baton = threading.Lock()
        self.baton.acquire()


class Clock:
    """Host threads in virtual time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._now: Callable[[], float] = library.late_clock_now
        self.threads = [HostThread("model", 0, 0.0)]
        self.current = self.threads[0]
        self.sites: dict[int, str] = {}
        """record → line of the engine at which the thread of the model waited."""
        self._woken_by: dict[int, int] = {}
        self._is_stuck = False

    @property
    def now(self) -> float:
        """The running thread's clock."""
        return self._now()

    def reached(self) -> float:
        """Return when the current stream has done what was issued to it so far."""
        return float(self._library.late_clock_reached())

    def work(self, name: str, seconds: float) -> None:
        """Let the running thread work on the host."""
        self._library.late_clock_work(name.encode(), seconds)
        self.turn()

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Name the kernels that the running thread issues in the block."""
        before, self.current.label = self.current.label, name
        self._library.late_clock_label(name.encode())
        try:
            yield
        finally:
            self.current.label = before
            self._library.late_clock_label(before.encode())

    def turn(self) -> None:
        """Let threads run that are behind this one."""
        self.current.time = self._now()
        self._pass_on(self._first())

    def block(self) -> None:
        """Wait until another thread calls `wake` for this one."""
        me, began = self.current, self._now()
        me.is_ready, me.time = False, began
        self._pass_on(self._first())
        if self._now() > began:
            self._library.late_clock_waited(self._woken_by[me.index], began)
            self.note_site(began)

    def note_site(self, since: float) -> None:
        """Note the engine's line at which the running thread has waited since then."""
        if self.current.index == 0 and self._now() > since:
            self.sites[self._library.late_clock_records(None) - 1] = _site()

    def wake(self, thread: HostThread) -> None:
        thread.time = max(thread.time, self._now())
        thread.is_ready = True
        self._woken_by[thread.index] = self.current.index

    def add(self, name: str) -> HostThread:
        thread = HostThread(name, len(self.threads), self._now())
        self.threads.append(thread)
        return thread

    def end(self) -> None:
        """End the running thread, which calls nothing of this clock afterwards."""
        self.current.is_ready = False
        self._give(self._first())

    def _first(self) -> HostThread:
        ready = [thread for thread in self.threads if thread.is_ready]
        self._is_stuck = not ready
        return min(ready, key=lambda thread: (thread.time, thread.index)) if ready else self.threads[0]

    def _pass_on(self, to: HostThread) -> None:
        me = self.current
        if to is not me:
            self._give(to)
            me.baton.acquire()
        if self._is_stuck:
            raise RuntimeError("Every thread waits for another one: " + ", ".join(t.name for t in self.threads) + ".")

    def _give(self, to: HostThread) -> None:
        self.current = to
        self._library.late_clock_switch(to.index, to.time)
        self._library.late_clock_label(to.label.encode())
        to.baton.release()

    def records(self) -> np.ndarray:
        """Return what was logged so far, an array of `RECORD`."""
        first = ctypes.c_void_p()
        count = self._library.late_clock_records(ctypes.byref(first))
        return np.frombuffer(ctypes.string_at(first.value or 0, count * RECORD.itemsize), RECORD).copy()

    def names(self) -> list[str]:
        """Return the names that records refer to."""
        found: list[str] = []
        while (name := self._library.late_clock_name(len(found))) is not None:
            found.append(name.decode())
        return found


def _site() -> str:
    """Return the engine's innermost lines, without those of tiers: "grads/collector.py:224, grads/collector.py:213"."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 2:
        before, _, path = frame.f_code.co_filename.rpartition("/infinity/")
        if before and not path.startswith(("tiers/", "interrupts")):
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return ", ".join(found)


_clock: Clock | None = None


def start(rates: Rates) -> Clock:
    """Begin virtual time, for the rest of this process. The calling thread is the model's."""
    global _clock
    assert _clock is None, "virtual time has begun"
    late.load()
    library = late._loaded()
    library.late_clock_start.argtypes = [ctypes.POINTER(_Rates)]
    library.late_clock_now.restype = ctypes.c_double
    library.late_clock_reached.restype = ctypes.c_double
    library.late_clock_switch.argtypes = [ctypes.c_int32, ctypes.c_double]
    library.late_clock_work.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.late_clock_waited.argtypes = [ctypes.c_int32, ctypes.c_double]
    library.late_clock_records.restype = ctypes.c_int64
    library.late_clock_name.restype = ctypes.c_char_p
    library.late_clock_start(_Rates(*vars(rates).values()))
    _clock = Clock(library)
    return _clock


def clock() -> Clock:
    assert _clock is not None, "virtual time has not begun"
    return _clock

"""Records the work of an engine's lanes during a recording. Otherwise a call costs one comparison.

Waits of the model's threads are counted all the time (`infinity.observe.ledger`).

The threads that do the work call it: tiers, copies of devices, collectives, updates, gradients, saved activations, and
the model's. Nothing waits, and no tensor is kept alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from infinity.concurrency import now
from infinity.observe.ledger import Waits
from infinity.observe.recording import MODEL, Mark, Recording, Request, Stamp, Stamped, Timed, Wait
from infinity.observe.timeline import Sample
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    import torch

_NOTHING: AbstractContextManager[None] = nullcontext()
_OURS = "infinity-"


class _OfThread(threading.local):
    """name, copies: see `Recorder.naming`. waits_for: reason of the thread's wait; "": it does not wait."""

    name = ""
    copies = ""
    waits_for: str = ""


class Recorder:
    """Records for any number of recordings. Thread-safe."""

    def __init__(
        self,
        stamp: Callable[[], Stamp] = now,
        calibrate: Callable[[], None] | None = None,
        waits: Waits | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        """stamp: of the compute issued so far by the calling thread. calibrate: called before stamps are used; it may
        wait for the device. waits: measures the waits of the model's threads. on_host: the host computes.
        """
        self.is_on = False
        self.waits = Waits() if waits is None else waits
        self._stamp = stamp
        self._calibrate = calibrate
        self._on_host = on_host
        self._recordings: tuple[Recording, ...] = ()
        self._of_thread = _OfThread()
        self._phase = ""
        self._access = threading.Lock()

    # -- for those who ask -------------------------------------------------------------------------------------------

    def start(self, steps: int | None = None) -> Recording:
        """Begin to record. Call `stop` with the result; it ends by itself after `steps` steps."""
        if self._calibrate is not None:
            self._calibrate()
        recording = Recording(self._stamp(), self._on_host, steps)
        with self._access:
            self._recordings += (recording,)
            self.is_on = True
        return recording

    def stop(self, recording: Recording) -> None:
        """End a recording. Idempotent."""
        with self._access:
            self._recordings = tuple(each for each in self._recordings if each is not recording)
            self.is_on = bool(self._recordings)

    def sample(self, nbytes: Mapping[TierKind, int]) -> None:
        """Record the present bytes in tiers."""
        for recording in self._recordings:
            recording.samples.append(Sample(now(), nbytes))

    def end_step(self) -> None:
        """Record the end of a step."""
        if self.is_on:
            stamp = self._stamp()
            for recording in self._recordings:
                recording.boundaries.append(stamp)
                if len(recording.boundaries) == recording.limit:
                    self.stop(recording)

    # -- for the engine's threads ------------------------------------------------------------------------------------

    def span(
        self, lane: str, name: str = "", nbytes: int = 0, stamp: Callable[[], Stamp] = now
    ) -> AbstractContextManager[None]:
        """Return a context for work of `lane`. stamp: that of a stream, if the block only issues the work."""
        return _Span(self, lane, name, nbytes, stamp) if self.is_on else _NOTHING

    def _add(self, lane: str, name: str, nbytes: int, start: Stamp, end: Stamp) -> None:
        work = Stamped(lane, name or self._of_thread.name, nbytes, _thread(), start, end)
        for recording in self._recordings:
            recording.work.append(work)

    def request(self, lane: str, name: str, nbytes: int, work: Timed, queue: str = "") -> None:
        """Record a request that another thread serves. queue: requests that are served in turn; default: the lane's."""
        if self.is_on:
            request = Request(queue or lane, lane, name, nbytes, _thread(), work)
            for recording in self._recordings:
                recording.requests.append(request)

    def naming(self, name: str, lane: str = "") -> AbstractContextManager[None]:
        """Return a context in which this thread's work without a name has this one. lane: that of its copies."""
        return self._naming(name, lane) if self.is_on else _NOTHING

    @contextmanager
    def _naming(self, name: str, lane: str) -> Iterator[None]:
        own = self._of_thread
        before = own.name, own.copies
        own.name, own.copies = name, lane
        try:
            yield
        finally:
            own.name, own.copies = before

    def copy(self, lane: str, nbytes: int, stamp: Callable[[], Stamp] = now) -> AbstractContextManager[None]:
        """Return a context in which a device copies `nbytes`. lane: if `naming` gives none; "": not recorded."""
        if not self.is_on:
            return _NOTHING
        lane = self._of_thread.copies or lane
        return _Span(self, lane, "", nbytes, stamp) if lane else _NOTHING

    # -- for the model's threads -------------------------------------------------------------------------------------

    def wait(self, lane: str, reason: str) -> AbstractContextManager[None]:
        """Return a context in which the model waits for work of `lane`, for a reason of `infinity.observe.ledger`.

        Nested contexts and those of helper threads are not counted.
        """
        return _Waiting(self, lane, reason)

    def loss(self, loss: torch.Tensor) -> float:
        """Return a loss, once the compute before it has ended: a wait of the model."""
        with self.wait("compute", "loss"):
            return loss.item()

    @property
    def is_waiting(self) -> bool:
        """True in a context of `wait`, in the model's threads."""
        return bool(self._of_thread.waits_for)

    def phase(self, name: str) -> None:
        """Record that the model computes in this phase from now on. "": it does not compute."""
        self._phase = name
        self._mark(name)

    def unit(self, name: str) -> None:
        """Record that the model uses this unit from now on."""
        if self.is_on and self._phase:
            self._mark(f"{self._phase} {name}")

    def _mark(self, name: str) -> None:
        if self.is_on:
            mark = Mark(name, self._stamp())
            for recording in self._recordings:
                recording.marks.append(mark)


class _Waiting(AbstractContextManager[None]):
    """See `Recorder.wait`."""

    __slots__ = ("_began", "_counts", "_lane", "_reason", "_recorder")

    def __init__(self, recorder: Recorder, lane: str, reason: str) -> None:
        self._recorder, self._lane, self._reason = recorder, lane, reason

    def __enter__(self) -> None:
        own = self._recorder._of_thread
        self._counts = not own.waits_for and _thread() == MODEL
        if self._counts:
            self._began = self._recorder.waits.begin()
            own.waits_for = self._reason  # last: after an error or an interrupt here, no wait would count again

    def __exit__(self, *error: object) -> None:
        if not self._counts:
            return
        recorder = self._recorder
        recorder._of_thread.waits_for = ""
        wait = recorder.waits.end(self._began, self._reason)
        if recorder.is_on:
            start, end = recorder.waits.stamps(wait)
            for recording in recorder._recordings:
                recording.waits.append(Wait(self._lane, start, end))


class _Span(AbstractContextManager[None]):
    """See `Recorder.span`."""

    __slots__ = ("_began", "_recorder", "_stamp", "_work")

    def __init__(self, recorder: Recorder, lane: str, name: str, nbytes: int, stamp: Callable[[], Stamp]) -> None:
        self._recorder, self._work, self._stamp = recorder, (lane, name, nbytes), stamp

    def __enter__(self) -> None:
        self._began = self._stamp()

    def __exit__(self, *error: object) -> None:
        self._recorder._add(*self._work, self._began, self._stamp())


def _thread() -> str:
    """Return the calling thread's name, as in a simulation."""
    name = threading.current_thread().name
    return name.partition("_")[0] if name.startswith(_OURS) else MODEL

"""Makes all ranks issue the same collectives in the same order. See [Note: agreement on collectives].

Ranks predict their next collective from those that they agreed on. A rank that issues the predicted one sends no
message: it follows. A rank that issues another one departs: it exchanges announcements with all ranks. Followers wait
in a collective that the departing rank has not joined. Their watching threads detect that and exchange announcements.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from infinity.comm.agreement.announcements import (
    WORDS,
    Agreed,
    Announcement,
    History,
    Operation,
    pack_flags,
    unpack_flags,
)
from infinity.comm.agreement.comparison import by_value, failed_collective, failures
from infinity.comm.groups import store_of
from infinity.comm.pairs import PairwiseCollectives
from infinity.errors import InfinityError, RanksError
from infinity.plan.layout import UnitLayout

_TICK = 0.05
"""Seconds between two looks of the thread at this rank's wait. Each takes the interpreter from the model's thread."""
_LONG = 1.0
"""Seconds of a wait for a device after which connections to other ranks are tested, and between two such tests."""
_JOIN = 5.0
"""Seconds that the thread may take to end: its store may not answer."""
_DEPARTURES = 3
"""Number of changes of a collective's flags after which they are exchanged every time. Flags that differ between ranks
reach it at once, since a follower's wait is longer than an exchange.
"""
_NOTE = "departed"
"""Key of the number of the collective before which a rank departed."""
_TEST_TAG = 1
"""Tag of messages that are never sent."""

_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Wait:
    """A collective that this rank waits in, or before which it waits for the announcements of others."""

    number: int
    announced: Announcement
    own: tuple[int, ...]
    issued: bool = False
    said: list[list[int]] | None = None
    """Words of all ranks, once they were exchanged."""
    test_at: float = field(default_factory=lambda: time.monotonic() + _LONG)
    """Time of the next test of connections."""


class Pending(Protocol):
    """Collectives that a device executes after they return."""

    def wait(self) -> None:
        """Return when those issued so far have ended, on the thread that issued them."""

    def abort(self) -> None:
        """End them, from any thread. Their results are invalid."""


class Announcer:
    """Agreement of the `size` ranks of `group`, a gloo group that nothing else uses. rank: this rank's number.

    Collectives run on one thread. pending: those that a device executes after they return; None if they end before they
    return, as on gloo, where they also fail when a rank that they wait for leaves. cause: returns which rank left and
    why, if that is known, after a collective has failed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        pending: Pending | None = None,
        cause: Callable[[], str] = lambda: "",
    ) -> None:
        self._group = group
        self._rank, self._size = rank, size
        self._pairs = PairwiseCollectives(group, rank, size)
        self._pending = pending
        self._cause = cause
        self.error = ""
        """The error that prevents all further collectives; empty if there is none."""
        self.failure = ""
        """This rank's own error, if it gives up."""
        self.units: Sequence[UnitLayout] = ()
        self.exchanges = 0
        """Number of exchanges of announcements."""
        self._history = History()
        self._departures: Counter[Announcement] = Counter()
        self._number = 0
        self.waiting: _Wait | None = None
        self._answering = threading.Lock()
        """Held by the watching thread while it uses the group for this rank's collective."""
        self._closing = threading.Event()
        if size > 1:
            self._store = store_of(group)
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._closing), name="infinity-watch", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread, and refer to the groups no more. No collective may be in progress."""
        self._closing.set()
        if self._size > 1:
            self._thread.join(_JOIN)
        del self._group, self._pairs, self._pending

    def run(
        self, announced: Announcement, present: set[int], flag_words: int, collective: Callable[[], _Result]
    ) -> _Result:
        """Return `collective()`, which all ranks issue.

        present: flags, to which those of the other ranks are added. Raises RanksError on all ranks if they issue
        different collectives, for this and every later one.
        """
        if self.error:
            raise RanksError(self.error)
        # Packed before anything is sent: `present` grows below.
        own = tuple(pack_flags(present, flag_words))
        self._number += 1
        wait = _Wait(self._number, announced, own)
        predicted = self._history.predicted
        self.waiting = wait
        try:
            with self.ended_ranks_raise(announced):
                try:
                    if not self._can_follow(wait, predicted):
                        self._exchange(wait)
                    wait.issued = not self.error
                    result = self._run_to_end(collective) if wait.issued else None
                finally:
                    with self._answering:  # an answer in progress decides
                        self.waiting = None
                if self.error:
                    raise RanksError(self.error)
        finally:
            # Recorded on all ranks or on none: predictions stay equal only if histories do.
            if not self.error:  # after an error of this rank's own, too: the others go on
                self._history.append(agreed := self._agreed(wait, predicted))
        # Most often equal, and unpacking costs more than the comparison.
        if agreed.union != own:
            present |= unpack_flags(agreed.union)
        return cast(_Result, result)

    def _can_follow(self, wait: _Wait, predicted: Agreed | None) -> bool:
        return (
            predicted is not None
            and predicted.own == wait.own
            and predicted.announced == wait.announced
            # Only a collective that no rank completes alone can be followed [Note: a rank that departs].
            and wait.announced.is_synchronous(self._size)
            and self._departures[wait.announced] < _DEPARTURES
        )

    def _run_to_end(self, collective: Callable[[], _Result]) -> _Result:
        try:
            return collective()
        finally:
            if self._pending is not None:
                self._pending.wait()

    def abort(self) -> None:
        """End pending collectives, which wait for a rank that departed or ended."""
        if self._pending is not None:
            self._pending.abort()

    @contextmanager
    def ended_ranks_raise(self, announced: Announcement | None = None) -> Iterator[None]:
        """Convert an error in a collective to RanksError, for this and every later one: a rank that ended leaves the
        others without its part. announced: the collective.
        """
        try:
            yield
        except InfinityError:
            raise
        except RuntimeError as error:
            if error.__traceback__ is not None:  # its frames refer to the group, whose connections are to close
                traceback.clear_frames(error.__traceback__)
            self.error = self.error or failed_collective(error, self._cause(), announced.function if announced else "")
            raise RanksError(self.error) from error

    def _agreed(self, wait: _Wait, predicted: Agreed | None) -> Agreed:
        """Return the record of a collective that all ranks issued."""
        # No announcement was exchanged, so every rank followed the same prediction.
        if wait.said is None:
            assert predicted is not None
            return predicted
        flags = [words[1 + WORDS :] for words in wait.said]
        # Flags that differ between ranks will differ again: an exchange is faster than the notice of a departure.
        if any(other != flags[0] for other in flags):
            self._departures[wait.announced] = _DEPARTURES
        elif predicted is not None and predicted.announced == wait.announced:
            self._departures[wait.announced] += 1
        return Agreed(wait.announced, wait.own, tuple(reduce(or_, column) for column in zip(*flags, strict=True)))

    def _exchange(self, wait: _Wait) -> None:
        """Exchange the announcements of all ranks. Sets `error` if they differ."""
        self.exchanges += 1
        said = self._pairs.all_gather_ints([wait.number, *wait.announced.words(), *wait.own])
        announcements = [Announcement.of(words[1 : 1 + WORDS]) for words in said]
        # First: a rank that gives up has another operation than the others, and its error is the reason.
        if any(announcement.operation is Operation.GIVE_UP for announcement in announcements):
            self.error = failures(self.failure, self._group)
        elif len({tuple(words[: 1 + WORDS]) for words in said}) > 1:
            self.error = self._describe(announcements)
        wait.said = said

    def _describe(self, announcements: list[Announcement]) -> str:
        parts = [f"{who} {announced.text(self.units)}" for announced, who in by_value(announcements).items()]
        said = f"the ranks issued different collectives: {'; '.join(parts)}."
        functions = dict.fromkeys(filter(None, (announced.function for announced in announcements)))
        if functions:
            return f"{said} Call {' and '.join(functions)} on all ranks, with the same arguments and in the same order."
        return (
            f"{said} All ranks must use the same units in the same order, and save, load and read states together. "
            "Control flow must not depend on rank-local data: run skipped blocks on empty inputs instead, or raise "
            "infinity.unit_size to the size of the block that holds all experts, which makes them one unit."
        )

    # -- the watching thread ----------------------------------------------------------------------------------------

    def look(self, wait: _Wait) -> None:
        """Inspect a long wait: leave a note if this rank departed, answer another rank's note if this one follows, and
        test connections if it waits for a device.
        """
        if not wait.issued:
            self._store.set(_NOTE, str(wait.number))  # again at each look: a late note of another rank replaces it
            return
        if self._pending is not None and time.monotonic() >= wait.test_at:
            wait.test_at = time.monotonic() + _LONG
            self._in_mid_collective(wait, self._test_connections)
        if wait.said is None and self._store.check([_NOTE]) and int(self._store.get(_NOTE)) == wait.number:
            self._in_mid_collective(wait, lambda: self._exchange(wait))

    def _in_mid_collective(self, wait: _Wait, work: Callable[[], object]) -> None:
        """Run `work` unless this rank's collective has ended. After an error, end it."""
        with self._answering:
            # Compared under the lock: the collective may have ended since the look began.
            if self.waiting is wait and not self.error:
                with suppress(RanksError), self.ended_ranks_raise():
                    work()
                if self.error:
                    self.abort()

    def _test_connections(self) -> None:
        """Raise RuntimeError if the connection to a rank is closed. A device waits forever for a rank that ended."""
        for rank in range(self._size):
            if rank != self._rank:
                dist.irecv(torch.empty(1), group=self._group, group_src=rank, tag=_TEST_TAG)


def _watch(announcer: weakref.ref[Announcer], closing: threading.Event) -> None:
    """Inspect waits of `announcer` that last longer than a tick, until it closes or ends."""
    wait, ticks = None, 0
    while not closing.wait(_TICK):
        # A strong reference for one turn only, so that an engine without a close is collected.
        watched = announcer()
        if watched is None:
            return
        wait, ticks = watched.waiting, ticks + 1 if watched.waiting is wait else 0
        # Most waits end soon, and in a long one the store of all ranks is asked less often.
        if wait is not None and (ticks == 1 or ticks % 5 == 4):
            with suppress(RuntimeError):  # the store has ended with its rank, whose connections are closed, too
                watched.look(wait)
        del watched

"""Commits the steps of a durable run beside training.

A step commits in four stages, in a thread of its own: its updates end; states in memory are written through, and all
data is synced; the rank's record is written and synced; the ranks agree that all have theirs. An update of the next
step waits for the agreement, since it overwrites the slots of the second-last commit. The thread holds no reference to
the model or the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity import concurrency
from infinity.checkpoint.format import Progress
from infinity.comm.side import SideChannel
from infinity.durable.record import CHECKSUMS, Record
from infinity.durable.run import DurableRun
from infinity.errors import StorageError, UsageError
from infinity.plan.io import Durable
from infinity.tier_kind import TierKind
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableTier
from infinity.tiers.slab import SlabTier
from infinity.tiers.space import MisplacedError
from infinity.tiers.transfer import Promise, Transfer
from infinity.update.job import UpdateProgress

_MISPLACED, _STOPPED = 65536.0, 65536.0**2
"""Added to a rank's number in the agreement if its files are not in their places, and if it was asked to stop; 1 stands
for a failure.
"""


@dataclass(frozen=True)
class Step:
    """A step to commit. unit_steps: lists that its updates change. blobs: called by the thread for those of the record.

    updated: units that it updates. written: tier in memory → offsets of extents that were written besides.
    """

    updates: Sequence[UpdateProgress]
    updated: Collection[int]
    written: Mapping[str, Collection[int]]
    progress: Progress
    unit_steps: Sequence[list[int]]
    blobs: Callable[[], Mapping[str, bytes]]


class Committing:
    """A transfer that is done once a step is committed on all ranks. Writes of later values wait for it."""

    def __init__(self, step: Step) -> None:
        self._updates = step.updates
        self._promise = Promise()

    def done(self) -> bool:
        return self._promise.done()

    def wait(self) -> None:
        """Raises StorageError if the step could not be committed, and UsageError where waiting would never end."""
        if not self.done() and not all(update.began.done() for update in self._updates):
            raise UsageError(
                "a parameter was edited before the last step is committed, which waits for updates in the next "
                "forward (infinity.durable). Edit it through infinity.GatheredParameters(), or set infinity.update to "
                '"after_backward".'
            )
        self._promise.wait()

    def keep(self) -> None:
        self._updates = ()
        self._promise.keep()

    def fail(self, error: BaseException) -> None:
        self._updates = ()
        self._promise.fail(error)

    def abandon(self) -> None:
        """Fail the updates that have not begun, so that the thread does not wait for them forever."""
        for update in self._updates:
            if not update.began.done():
                update.fail(StorageError("the engine was closed before the update"))


class Commits:
    """The thread that commits, and the state of the last commit."""

    def __init__(
        self,
        run: DurableRun,
        tier: DurableTier,
        memory: Mapping[TierKind, SlabTier],
        extents: Sequence[Durable],
        channel: SideChannel,
        device: Device,
        refused: Callable[[], bool],
    ) -> None:
        """memory: tiers whose states are written through. refused: returns whether an update was skipped, so that the
        states belong to no step.
        """
        self.run = run
        self.stops = False
        """True once any rank was asked to stop; equal on all ranks between two commits."""
        self.misplaced = ""
        """Reason why the last commit was left out on all ranks; empty if it was not. The states are right, training can
        continue, and the next commit is tried again. The text differs between ranks.
        """
        self._writes: Mapping[str, Mapping[int, int]] | None = None
        """Tier in memory → its writes, as of the last commit; None: nothing was committed or adopted."""
        self.asked_to_stop = False
        self._tier = tier
        self._memory = memory
        self._extents = extents
        self._channel = channel
        self._device = device
        self._refused = refused
        self.is_single = channel.is_single
        """True if there is one rank."""
        self._last: Committing | None = None
        self._queue: concurrency.Queue = concurrency.fifo()
        self._thread: threading.Thread | None = None

    def start(self, step: Step) -> Transfer:
        """Commit a step once its updates have ended. The commit before it must have been waited for."""
        if self._thread is None:
            self._thread = concurrency.thread(self._work, "infinity-commit")
            self._thread.start()
        committing = self._last = Committing(step)
        self._queue.put((step, committing))
        return committing

    def note_writes(self) -> None:
        """Note that the states in memory are those of the commit, from now on."""
        self._writes = {name: dict(tier.writes) for name, tier in self._memory.items()}

    @property
    def are_present(self) -> bool:
        """True if the last commit is complete and nothing was written to the tiers since. Does not see updates of
        states in memory, which write nothing; they change the steps of their unit.
        """
        if self._writes is None or not self._tier.slots.are_committed:
            return False
        return all(
            self._memory[tier].writes.get(offset) == self._writes[tier].get(offset)
            for tier, offset in ((each.working.tier, each.working.offset) for each in self._extents)
            if tier in self._memory
        )

    def ask_to_stop(self) -> None:
        """Note that this rank is to stop, such as by SIGTERM. The step under way is then the last."""
        self.asked_to_stop = True

    def wait(self) -> None:
        """Wait for the last commit. Raises StorageError if it failed; its updates must have begun."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """End the thread after the commit under way. Idempotent."""
        if self._last is not None:
            self._last.abandon()
        if self._thread is not None:
            self._queue.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._thread = None
        self._channel.close()

    def _work(self) -> None:
        self._device.enter_thread()
        while (item := self._queue.get()) is not None:
            step, committing = item
            before = self.run.record
            try:
                self._commit(step)
            except BaseException as error:  # noqa: BLE001 - raised by every wait for the commit
                committing.fail(self._failure(step, before, error))
            else:
                committing.keep()
            del item, step, committing, before

    def _failure(self, step: Step, before: Record | None, error: BaseException) -> StorageError:
        """before: the commit before `step`. This rank may have a record of `step` that other ranks lack."""
        last = "No step is committed."
        if before is not None:
            last = f"The last committed step is {before.progress.global_steps}, and a restart resumes from it."
        failure = StorageError(
            f"step {step.progress.global_steps} could not be committed to {self.run.path}: {error}. {last} Fix the "
            "error and restart the run."
        )
        failure.__cause__ = error
        return failure

    def _commit(self, step: Step) -> None:
        failed: BaseException | None = None
        misplaced = ""
        before = self.run.record
        try:
            for update in step.updates:
                update.done.wait()
            if self._refused():
                raise StorageError("a gradient was NaN or infinite, so its update was skipped")
            self.note_writes()  # first: what is written from now on may be missing in the commit
            self._write_through(step, everything=before is None)
            sealed = self._tier.seal()
            try:
                self._record(step, sealed, before)
            except MisplacedError as error:
                misplaced = str(error)
        except BaseException as error:  # noqa: BLE001 - raised below, once all ranks know
            failed = error
        total = self._channel.sum(
            float(failed is not None) + _MISPLACED * bool(misplaced) + _STOPPED * self.asked_to_stop
        )
        stops, rest = divmod(total, _STOPPED)
        elsewhere, failures = divmod(rest, _MISPLACED)
        self.stops = self.stops or bool(stops)
        if failed is not None:
            raise failed
        if failures:
            self.run.record = before
            raise StorageError("another rank could not commit it: see the error of that rank")
        self.misplaced = ""
        if elsewhere:
            self.run.withdraw(before)
            self.misplaced = self._explain(step, misplaced or "files of another rank are missing: see its error")
            return
        self._tier.slots.commit(sealed)
        self.run.conclude()

    def _record(self, step: Step, sealed: bytes, before: Record | None) -> None:
        """Sync the states and write their record. Raises MisplacedError if nothing would find them."""
        blobs = {**step.blobs(), CHECKSUMS: self._tier.checksums}
        known = (b"", None) if before is None else (before.slots, before.digests)
        digests = self._tier.digests(sealed, *known)
        self._tier.sync()
        self._tier.check_named()
        self.run.check_held()
        unit_steps = [list(steps) for steps in step.unit_steps]
        self.run.write(Record(self.run.next_number(), step.progress, unit_steps, sealed, blobs), digests)

    def _explain(self, step: Step, problem: str) -> str:
        return (
            f"step {step.progress.global_steps} was not committed to {self.run.path}: {problem}. The states are "
            "intact: call engine.save_checkpoint(directory) on all ranks and load it in another run (infinity.run), or "
            "move the files back, and the next step is committed."
        )

    def _write_through(self, step: Step, *, everything: bool) -> None:
        """Write the states in memory that changed since the last commit to their slots."""
        writing = []
        for each in self._extents:
            tier, written = self._memory.get(each.working.tier), step.written.get(each.working.tier, ())
            if tier is not None and (everything or each.unit in step.updated or each.working.offset in written):
                writing.append(self._tier.write(each.first, tier.memory(each.working)))
        for transfer in writing:
            transfer.wait()

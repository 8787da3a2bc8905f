"""Saves a checkpoint while training continues.

A thread reads the units one after another and writes one file for each. Training writes to the tiers of a unit only
after this rank's shard of it has been read (`Unit.snapshot_read`). The checkpoint therefore holds the states as of the
call of save, and only the unit being written is copied in memory. The thread never waits for training, and holds no
reference to the model or the engine.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError
from infinity.observe.log import logger
from infinity.tiers.transfer import Promised, Transfer


class Saving:
    """A checkpoint being written in the background. `path` is its final folder."""

    def __init__(self, path: Path, units: Iterable[int]) -> None:
        self.path = path
        """Folder of the checkpoint once it is complete."""
        self.reported = False
        """True once the outcome has been returned or raised to the caller."""
        self._copied: dict[int, Future[None]] = {index: Future() for index in units}
        self._ended: Future[None] = Future()
        self._failure: BaseException | None = None
        self._stopped = False

    def done(self) -> bool:
        """Return True once the save has finished or failed."""
        return self._ended.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and return its folder.

        Raises CheckpointError if it could not be written. Its files are removed then, and `latest` is unchanged.
        """
        self._ended.result()
        self.reported = True
        if (error := self.error()) is not None:
            raise error
        return self.path

    def error(self) -> CheckpointError | None:
        """Return the error that ended the save, or None."""
        if self._failure is None:
            return None
        error = CheckpointError(f"the checkpoint {self.path} could not be written in the background: {self._failure}")
        error.__cause__ = self._failure
        return error

    def snapshot_read(self, unit: int) -> Transfer:
        """Return a transfer that is done once the unit's states have been read."""
        return Promised(self._copied[unit])

    def release_unit(self, unit: int) -> None:
        """Allow training to write the unit's states. Raises CheckpointError if the save is to end after this unit."""
        self._copied[unit].set_result(None)
        if self._stopped:
            raise CheckpointError("it was stopped before it was complete")

    def stop(self) -> None:
        """Request that the save ends after the unit it is reading."""
        self._stopped = True

    def end(self, failure: BaseException | None) -> None:
        for copied in self._copied.values():
            if not copied.done():
                copied.set_result(None)
        # Without its traceback, whose frames reference the buffers of the save.
        self._failure = failure.with_traceback(None) if failure is not None else None
        self._ended.set_result(None)


class Saver:
    """Runs an engine's background saves, one at a time."""

    def __init__(self) -> None:
        self.last: Saving | None = None
        self._open: Saving | None = None
        """The last save, until all ranks have exchanged its outcome."""
        self._channel: SideChannel | None = None
        self._thread: threading.Thread | None = None
        self._can_raise = False
        """True if `closing` can raise the error of a save; otherwise the error is logged."""
        self._working = False
        self._then: Callable[[], None] | None = None
        """Called by the thread after its save, if set."""

    def channel(self, ranks: Communicator) -> SideChannel:
        """Return the channel for the collectives of checkpoints. Collective; called in the model's thread."""
        if self._channel is None:
            self._channel = SideChannel(ranks)
        return self._channel

    def start(self, saving: Saving, work: Callable[[Saving], None]) -> None:
        """Run `work`, which releases each unit once it has read it, in a thread. No save may be under way."""
        self._thread = threading.Thread(target=self._run, args=(saving, work), name="infinity-save", daemon=True)
        self.last = self._open = saving
        self._working = True
        try:
            self._thread.start()
        except BaseException as error:
            self._thread, self._working = None, False
            saving.end(error)
            raise

    def _run(self, saving: Saving, work: Callable[[Saving], None]) -> None:
        failure: BaseException | None = None
        try:
            work(saving)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            failure = error
        saving.end(failure)
        self._working = False
        if self._then is not None:
            self._close(self._then)

    # -- called by the model's thread --------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait until no save is under way."""
        if self._open is not None:
            self._open._ended.result()

    def poll_finished(self, ranks: Communicator) -> bool:
        """Return True if a save has ended since the last call of `failure`. Collective; same result on all ranks."""
        return self._open is not None and ranks.totals(float(self._open.done()))[0] > 0

    def failure(self, ranks: Communicator) -> CheckpointError | None:
        """Wait for the save under way, and return its error or None. Collective; each error is returned once."""
        if self._open is None:
            return None
        self.join()
        saving = self._open
        error = saving.error()
        (unreported,) = ranks.totals(float(error is not None and not saving.reported))
        self._open, saving.reported = None, True
        return error if unreported else None

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Wrap the shutdown of the engine on this rank, and raise the last save's unreported error at its end.

        If another exception is propagating, the error is logged instead.
        """
        self._can_raise = sys.exc_info()[0] is None
        try:
            yield
        except BaseException:
            self._log()
            raise
        if (error := self._unreported()) is not None:
            raise error

    def close(self, then: Callable[[], None]) -> None:
        """Wait for the save under way, then call `then`. An interrupt stops the save."""
        if self._thread is threading.current_thread():  # garbage collection may close an engine in any thread
            if self._working:
                self._then = then
            else:
                self._close(then)
            return
        try:
            self.join()
        except BaseException:
            if self._open is not None:
                self._open.stop()
            raise
        finally:
            if self._thread is not None:
                self._thread.join()
            self._close(then)

    def _close(self, then: Callable[[], None]) -> None:
        self._open = self._then = None
        if not self._can_raise:
            self._log()
        if self._channel is not None:
            self._channel.close()
        then()

    def _unreported(self) -> CheckpointError | None:
        saving = self.last
        if saving is None or saving.reported:
            return None
        saving.reported = True
        return saving.error()

    def _log(self) -> None:
        if (error := self._unreported()) is not None:
            logger.error("%s", error)

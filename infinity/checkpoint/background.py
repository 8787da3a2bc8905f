"""A save that goes on while training does.

Its thread reads unit after unit and writes its file. What training writes to the tiers of a unit waits until this
rank's shard of it has been read (`Unit.copied`): so the checkpoint is what the states were when it was asked for, and
the only copy in memory is of the unit that is being written. The thread never waits for training, and refers to neither
model nor engine.
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
    """A checkpoint that is being written in the background; `path` is where it will be."""

    def __init__(self, path: Path, units: Iterable[int]) -> None:
        self.path = path
        self.reported = False
        """Whether somebody knows how it ended."""
        self._copied: dict[int, Future[None]] = {index: Future() for index in units}
        self._ended: Future[None] = Future()
        self._failure: BaseException | None = None
        self._stopped = False

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._ended.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, on all ranks; returns its folder. CheckpointError if it could not be
        written: then nothing is left of it, and the checkpoint before is still the last one.
        """
        self._ended.result()
        self.reported = True
        if (error := self.error()) is not None:
            raise error
        return self.path

    def error(self) -> CheckpointError | None:
        """Why it ended badly."""
        if self._failure is None:
            return None
        error = CheckpointError(f"the checkpoint {self.path} could not be written in the background: {self._failure}")
        error.__cause__ = self._failure
        return error

    def snapshot_read(self, unit: int) -> Transfer:
        """Done when the unit's states have been read."""
        return Promised(self._copied[unit])

    def release_unit(self, unit: int) -> None:
        """Training may write the unit's states."""
        self._copied[unit].set_result(None)

    def stop(self) -> None:
        """End it before it is whole, soon."""
        self._stopped = True

    def check_stopped(self) -> None:
        if self._stopped:
            raise CheckpointError("it was stopped before it was whole")

    def end(self, failure: BaseException | None) -> None:
        for copied in self._copied.values():
            if not copied.done():
                copied.set_result(None)
        # Without its traceback, whose frames refer to what was being written.
        self._failure = failure.with_traceback(None) if failure is not None else None
        self._ended.set_result(None)


class Saver:
    """The saves of one engine in the background, one at a time."""

    def __init__(self) -> None:
        self.last: Saving | None = None
        self._open: Saving | None = None
        """The last one, until all ranks know how it ended."""
        self._channel: SideChannel | None = None
        self._thread: threading.Thread | None = None
        self._heard = False
        """Whether somebody hears of what goes wrong at the end."""
        self._working = False
        self._then: Callable[[], None] | None = None
        """What is done when the thread has ended."""

    def channel(self, ranks: Communicator) -> SideChannel:
        """What checkpoints are exchanged through. All ranks call it, from the thread that runs the model."""
        if self._channel is None:
            self._channel = SideChannel(ranks)
        return self._channel

    def start(self, saving: Saving, work: Callable[[Saving], None]) -> None:
        """Carry out `work`, which lets go of units as it has read them, in a thread. None may be under way."""
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
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            failure = error
        saving.end(failure)
        self._working = False
        if self._then is not None:
            self._close(self._then)

    # -- where the model's thread meets it ---------------------------------------------------------------------------

    def join(self) -> None:
        """Wait until none is under way."""
        if self._open is not None:
            self._open._ended.result()

    def poll_finished(self, ranks: Communicator) -> bool:
        """Whether a save has ended since the last call of `failure`. All ranks call it, and get the same answer."""
        return self._open is not None and ranks.totals(float(self._open.done()))[0] > 0

    def failure(self, ranks: Communicator) -> CheckpointError | None:
        """Wait for the save under way; why it ended badly, told once. All ranks call it, and all are told."""
        if self._open is None:
            return None
        self.join()
        saving = self._open
        error = saving.error()
        (untold,) = ranks.totals(float(error is not None and not saving.reported))
        self._open, saving.reported = None, True
        return error if untold else None

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Around the end of the engine on this rank: raises at last why a save ended badly, if nobody was told.

        It is logged where another error is being raised, which it must not replace.
        """
        self._heard = sys.exc_info()[0] is None
        try:
            yield
        except BaseException:
            self._log()
            raise
        if (error := self._untold()) is not None:
            raise error

    def close(self, then: Callable[[], None]) -> None:
        """Wait for the save under way, then do `then`. An interrupt stops it."""
        if self._thread is threading.current_thread():  # an engine that nobody closed may be collected in any thread
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
        if not self._heard:
            self._log()
        if self._channel is not None:
            self._channel.close()
        then()

    def _untold(self) -> CheckpointError | None:
        saving = self.last
        if saving is None or saving.reported:
            return None
        saving.reported = True
        return saving.error()

    def _log(self) -> None:
        if (error := self._untold()) is not None:
            logger.error("%s", error)

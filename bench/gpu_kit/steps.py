"""Runs the steps of a call within its time, and reports the outcomes after each, and while one runs.

A step is a command. Its output goes directly to a file, so nothing is lost with the process. A step that exceeds its
time gets SIGABRT, on which faulthandler prints the stacks of all threads, and later SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STACKS_SECONDS = 15
"""Time for the stacks between SIGABRT and SIGKILL."""
REPORT_SECONDS = 60
"""Seconds of a step after which its log and figures are written, again and again."""
LEAST_SECONDS = 5
"""A step with less time than this is not started."""


@dataclass(frozen=True)
class Outcome:
    """A step. what: "passed", "failed with status N", "out of time", "stopped" with the call, "not run", "running"."""

    step: str
    what: str
    seconds: float = 0.0
    why: str = ""

    @property
    def passed(self) -> bool:
        return self.what == "passed"

    @property
    def failed(self) -> bool:
        return self.what not in ("passed", "not run", "running")


class Steps:
    """The steps of one call.

    folder: for a log of each step. seconds: of the call, from now on. folder_of_commands: where they run. after_each:
    called with all outcomes so far, after each step and while it runs.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        *,
        environment: Mapping[str, str],
        folder_of_commands: Path,
        after_each: Callable[[Sequence[Outcome]], object],
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._folder = folder
        # The stacks of a last step that hangs are within the call, too.
        self._end = time.monotonic() + seconds - STACKS_SECONDS - LEAST_SECONDS
        # Python prints stacks in a crash, and writes each line at once.
        self.environment = {**environment, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        self._cwd = folder_of_commands
        self._after_each = after_each

    @property
    def left(self) -> float:
        """Seconds left to the call."""
        return self._end - time.monotonic()

    def run(self, step: str, seconds: float, command: Sequence[str | Path], **environment: str) -> Outcome:
        """Run a command for at most `seconds`, or as long as the call lasts. Prints its output."""
        limit = min(seconds, self.left)
        if limit < LEAST_SECONDS:
            return self.skip(step, "the time of the call is over")
        words = [str(word) for word in command]
        print(f"-- {step}: {shlex.join(words)} ({limit:.0f} s at most)", flush=True)
        began = time.monotonic()
        try:
            what = self._execute(words, step, limit, {**self.environment, **environment})
        except BaseException:  # the call is stopped: what the step has written is worth its place in the results
            self._note(Outcome(step, "stopped", time.monotonic() - began))
            raise
        return self._note(Outcome(step, what, time.monotonic() - began))

    def skip(self, step: str, why: str) -> Outcome:
        """Note a step that is not run."""
        return self._note(Outcome(step, "not run", why=why))

    def log_of(self, step: str) -> Path:
        return self._folder / f"{step}.txt"

    def _note(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        text = f"-- {outcome.step}: {outcome.what}" + (f": {outcome.why}" if outcome.why else "")
        print(f"{text} ({outcome.seconds:.0f} s)", flush=True)
        self._after_each(self.outcomes)
        return outcome

    def _execute(self, command: Sequence[str], step: str, limit: float, environment: Mapping[str, str]) -> str:
        log = self.log_of(step)
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=dict(environment), cwd=self._cwd, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                output.write(f"{error}\n".encode())
                print(error, flush=True)
                return "failed with status 127"
        with _shown(log), _guarded(process):
            try:
                status = self._wait(process, step, limit)
                return "passed" if status == 0 else f"failed with status {status}"
            except subprocess.TimeoutExpired:
                _stop(process)
                return "out of time"
            except BaseException:
                _stop(process)
                raise
            finally:
                _signal(process, signal.SIGKILL)  # children that it left running

    def _wait(self, process: subprocess.Popen[bytes], step: str, limit: float) -> int:
        """Return the status; TimeoutExpired after `limit`. Writes what is known now and then."""
        began = time.monotonic()
        while True:
            spent = time.monotonic() - began
            self._after_each([*self.outcomes, Outcome(step, "running", spent)])
            try:
                return process.wait(min(REPORT_SECONDS, max(0.0, limit - spent)))
            except subprocess.TimeoutExpired:
                if time.monotonic() - began >= limit:
                    raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGABRT, then SIGKILL. A process that hangs in the driver outlives both; the next step begins anyway."""
    _signal(process, signal.SIGABRT)
    for last in (STACKS_SECONDS, LEAST_SECONDS):
        try:
            process.wait(last)
            return
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the group of `process` if this process is killed in the block: the group would keep the device.

    A shell reads from a pipe that this process alone can write to, and so learns of its end.
    """
    command = ["sh", "-c", f"read -r line; kill -s KILL -- -{process.pid}"]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


@contextlib.contextmanager
def _shown(log: Path) -> Iterator[None]:
    """Print what is written to a file while the block runs."""
    ended = threading.Event()

    def show() -> None:
        with open(log, "rb") as written:
            while True:
                is_last = ended.is_set()
                sys.stdout.write(written.read().decode(errors="replace"))
                sys.stdout.flush()
                if is_last:
                    return
                ended.wait(0.2)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

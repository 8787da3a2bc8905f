"""Profiles steps of an engine: a timeline of its lanes, written as a trace for Perfetto when the steps have ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from infinity.concurrency import now
from infinity.errors import UsageError
from infinity.inputs import replacing
from infinity.interrupts import exit_on_sigterm
from infinity.observe.log import logger
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Recording
from infinity.observe.timeline import chrome_trace
from infinity.tier_kind import TierKind

_under_way: set[Path] = set()
"""Files that profiles of this process will write."""


class Profiler:
    """The profile of one engine, if one is asked for. Refers to neither model nor engine."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps = self._left = 0
        self._out: Path | None = None
        """The file to write; None: no profile is asked for."""
        self._recording: Recording | None = None
        """None: the next step has not begun."""
        self._restore_handler: Callable[[], None] = lambda: None

    def begin(self, steps: int, out: str | os.PathLike[str], nbytes: Mapping[TierKind, int] | None) -> None:
        """Record the next `steps` steps. nbytes: present bytes in tiers; None: a step is under way.

        Raises UsageError for bad arguments, and while a profile is going on.
        """
        if self._out is not None:
            raise UsageError(
                f"engine.profile() was called while another profile goes on, which writes {self._out} after "
                f"{self._left} more steps: call it after these"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(f"engine.profile(steps={steps!r}): pass a whole number of steps from 1")
        if not isinstance(out, str | os.PathLike) or not os.fspath(out):
            raise UsageError(f"engine.profile(out={out!r}) names no file: pass a path such as trace.json")
        path, rank = Path(out).resolve(), _rank()  # a link stays one
        if rank:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"engine.profile() cannot write {path}: pass a file in an existing, writable folder")
        if path in _under_way:
            raise UsageError(f"another engine's profile goes on that writes {path}: give engine.profile() another file")
        _under_way.add(path)
        self._steps = self._left = steps
        self._out = path
        self._restore_handler = exit_on_sigterm()
        if nbytes is not None:
            self._start(nbytes)

    def end_step(self, nbytes: Callable[[], Mapping[TierKind, int]]) -> None:
        """Count the end of a step, and write the file after the last one. nbytes: returns the present bytes in tiers.

        Call it after the recorder's `end_step`.
        """
        if self._out is None:
            return
        if self._recording is None:
            self._start(nbytes())
            return
        self._recorder.sample(nbytes())
        self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        """Write what has been recorded. Idempotent."""
        out, recording = self._out, self._recording
        self._out = self._recording = None
        if out is not None:
            _under_way.discard(out)
            self._restore_handler()
        if recording is None or out is None:
            return
        self._recorder.stop(recording)
        rank = _rank()
        try:
            text = json.dumps(chrome_trace(*recording.timeline(now()), rank=rank))
            with replacing(out) as file:  # completely or not at all
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("the profile was not written to %s: %s", out, error.strerror or error)
            return
        if rank == 0:
            done = self._steps - self._left
            steps = f"{done} steps" if not self._left else f"{done} of {self._steps} steps, and ended early"
            logger.info("profiled %s: %s (open it at https://ui.perfetto.dev, or with infinity timeline)", steps, out)

    def _start(self, nbytes: Mapping[TierKind, int]) -> None:
        self._recording = self._recorder.start()
        self._recorder.sample(nbytes)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

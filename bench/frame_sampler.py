"""Python frames of all threads, sampled by a thread several thousand times a second.

torch.profiler with stacks slows the Python that it records, and omits the Python of autograd's threads.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

INTERVAL = 0.0002
SWITCH = 0.0001
"""Seconds after which a thread releases the GIL. A sample takes less, so frames rarely change while they are read."""
OURS = 3
"""Frames of a stack that are kept beside the innermost one."""
DEPTH = 64
LIMIT = 4_000_000
"""Stacks that are kept, 16 bytes each."""


class Frame(NamedTuple):
    """A line that a thread executed. file: from the package's folder on. is_ours: one of the sampler's folders."""

    file: str
    line: int
    function: str
    is_ours: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Sample(NamedTuple):
    """Stacks, innermost frame first, by the names of their threads. ns: of time.perf_counter_ns."""

    ns: int
    stacks: dict[str, tuple[Frame, ...]]


def own_folders() -> list[str]:
    """Return the folders of the package and of the benchmarks."""
    spec = find_spec("infinity")
    package = [str(Path(spec.origin).parent)] if spec is not None and spec.origin is not None else []
    return [*package, str(Path(__file__).parent)]


class FrameSampler:
    """Context manager that samples while it is open; the calling thread is "main".

    Threads that no Python started are "autograd", "autograd 2", …; a stack holds its innermost frame and the innermost
    frames of `folders`. The sampler never raises: `error` says why it ended early.
    """

    def __init__(self, folders: Sequence[str] | None = None, *, interval: float = INTERVAL, limit: int = LIMIT) -> None:
        self.error = ""
        self._folders = tuple(f"{folder.rstrip('/')}/" for folder in (own_folders() if folders is None else folders))
        self._interval, self._limit = interval, limit
        self._main = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._switch = sys.getswitchinterval()
        # Flat arrays, which the garbage collector does not scan.
        self._times, self._first = array("q"), array("q")  # of a sample: its time and its first stack
        self._idents, self._stacks = array("Q"), array("q")  # of a stack: its thread and its number
        self._numbers: dict[tuple[int, ...], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._is_ours: dict[int, bool] = {}
        self._names: dict[int, str] = {}

    def __enter__(self) -> FrameSampler:
        self._main, self._switch = threading.get_ident(), sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="frame-sampler", daemon=True)
        sys.setswitchinterval(min(self._switch, SWITCH))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        sys.setswitchinterval(self._switch)

    def _run(self) -> None:
        own = threading.get_ident()
        try:
            while not self._end.is_set():
                time.sleep(self._interval)
                if len(self._times) % 64 == 0:
                    self._note_names()
                self._sample(own)
                if len(self._stacks) >= self._limit:
                    self.error = f"the sampler ended after {len(self._stacks)} stacks"
                    break
            self._note_names()
        except Exception as error:  # noqa: BLE001 - the measurement continues without samples
            self.error = f"the sampler ended: {type(error).__name__}: {error}"

    def _note_names(self) -> None:
        for thread in threading.enumerate():
            if thread.ident is not None and not isinstance(thread, threading._DummyThread):
                self._names[thread.ident] = thread.name

    def _sample(self, own: int) -> None:
        frames = sys._current_frames()
        frames.pop(own, None)
        self._first.append(len(self._stacks))
        self._times.append(time.perf_counter_ns())
        for ident, frame in frames.items():
            key = self._key(frame)
            self._idents.append(ident)
            self._stacks.append(self._numbers.setdefault(key, len(self._numbers)))

    def _key(self, frame: FrameType | None) -> tuple[int, ...]:
        """Return the identities of codes and the lines of the frames that are kept."""
        found: list[int] = []
        ours = depth = 0
        while frame is not None and depth < DEPTH and ours < OURS:
            code = frame.f_code
            known = self._is_ours.get(id(code))
            if known is None:
                self._codes[id(code)] = code  # alive, so that its identity stays its own
                known = self._is_ours[id(code)] = code.co_filename.startswith(self._folders)
            if known or not depth:
                found += (id(code), frame.f_lineno or 0)  # f_lineno is None between lines
                ours += known
            depth += 1
            frame = frame.f_back
        return tuple(found)

    def samples(self) -> list[Sample]:
        """Return all samples in the order of time. Call it after the end."""
        names = self._thread_names()
        stacks = [self._frames_of(key) for key in self._numbers]
        ends = [*self._first[1:], len(self._stacks)]
        return [
            Sample(
                ns, {names[self._idents[k]]: stacks[self._stacks[k]] for k in range(first, min(end, len(self._stacks)))}
            )
            for ns, first, end in zip(self._times, self._first, ends, strict=False)
        ]

    def _thread_names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        count: Counter[str] = Counter()
        for ident in dict.fromkeys(self._idents):
            name = "main" if ident == self._main else self._names.get(ident, "autograd")
            count[name] += 1
            found[ident] = name if count[name] == 1 else f"{name} {count[name]}"
        return found

    def _frames_of(self, key: tuple[int, ...]) -> tuple[Frame, ...]:
        return tuple(self._frame(self._codes[code], line) for code, line in zip(key[::2], key[1::2], strict=True))

    def _frame(self, code: CodeType, line: int) -> Frame:
        ours = next((folder for folder in self._folders if code.co_filename.startswith(folder)), None)
        path = Path(code.co_filename)
        file = str(path.relative_to(Path(ours).parent)) if ours else "/".join(path.parts[-2:])
        return Frame(file, line, code.co_name, ours is not None)

    def intervals(self) -> list[float]:
        """Return seconds between samples, ascending."""
        return sorted((after - before) / 1e9 for before, after in zip(self._times, self._times[1:], strict=False))


def between(samples: Sequence[Sample], times: Sequence[float], start: float, end: float, reach: float) -> list[Sample]:
    """Return the samples from `start` to `end`; without one, the last before `end`, at most `reach` before `start`.

    times: of each sample, ascending, on the clock of the other arguments.
    """
    first, last = bisect_right(times, start), bisect_right(times, end)
    if first == last and last and times[last - 1] >= start - reach:
        first -= 1
    return list(samples[first:last])

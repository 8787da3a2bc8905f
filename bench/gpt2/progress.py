"""Live progress of a training run: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import math
import time
from collections import deque
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpt2.duration import show_seconds
from gpt2.meter import StepRecord
from infinity.sizes import show_bytes

RECENT = 20
"""Speeds shown are means of this many steps."""


class Progress:
    """`with Progress(300) as progress:` and `progress.update(record)` after each step."""

    def __init__(
        self,
        steps: int | None,
        *,
        done: int = 0,
        console: Console | None = None,
        seconds_between_lines: float = 10,
        plain_bytes: int | None = None,
    ) -> None:
        """steps: number of steps, or None until `set_steps` gives it. plain_bytes: host memory that a plain loop needs,
        to show beside the peak; None: neither is shown.
        """
        self.console = console or Console()
        self._steps, self._done = steps, done
        self._recent: deque[StepRecord] = deque(maxlen=RECENT)
        self._held_out: float | None = None
        self._activity = ""
        self._plain_bytes = plain_bytes
        self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)
        self._between, self._last_line = seconds_between_lines, -math.inf

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def update(self, record: StepRecord) -> None:
        """A step has ended."""
        self._done, self._activity = record.step, ""
        self._recent.append(record)
        if not self.console.is_terminal:
            now = time.monotonic()
            if now - self._last_line >= self._between or self._done == self._steps:
                self._last_line = now
                left = "" if self._done == self._steps else f", {self._time_left()}"
                self.console.print(f"{self._position()}: {self._figures().plain}{left}{self._memory()}", soft_wrap=True)
                self._held_out = None  # a line repeats no measurement; a bar shows the last one

    def set_steps(self, steps: int) -> None:
        """Set the number of steps, once it is known."""
        self._steps = steps

    def say(self, line: str) -> None:
        """Print a line above the progress."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def held_out(self, loss: float) -> None:
        """The loss on held-out text was measured: the next line shows it."""
        self._held_out, self._activity = loss, ""

    def doing(self, activity: str) -> None:
        """Something other than a step is going on, "measuring held-out loss" say."""
        self._activity = activity

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = self._activity or (self._time_left() if self._recent else "first step")
        bar = ProgressBar(total=self._steps, completed=self._done)
        head.add_row(Text(self._position(), "bold"), bar, Text(left, "cyan"))
        memory = self._memory()
        yield Group(head, self._figures(), *([Text(memory.removeprefix("; "))] if memory else []))

    def _position(self) -> str:
        return f"step {self._done}" if self._steps is None else f"step {self._done}/{self._steps}"

    def _time_left(self) -> str:
        if self._steps is None:
            return "measuring speed"
        a_step = sum(r.seconds for r in self._recent) / max(1, len(self._recent))
        return f"{show_seconds((self._steps - self._done) * a_step)} left"

    def _memory(self) -> str:
        """The peak of host memory beside a plain loop's need, to append to a line."""
        if self._plain_bytes is None or not self._recent:
            return ""
        peak = show_bytes(self._recent[-1].host_peak_bytes)
        return f"; peak memory {peak}, a plain loop needs {show_bytes(self._plain_bytes)}"

    def _figures(self) -> Text:
        if not self._recent:
            return Text("")
        seconds = sum(r.seconds for r in self._recent)
        tokens = sum(r.seconds * r.tokens_per_second for r in self._recent)
        read, written = (
            sum(getattr(r, key) for r in self._recent) for key in ("nvme_bytes_read", "nvme_bytes_written")
        )
        parts: list[tuple[str, str]] = [("loss ", ""), (f"{self._recent[-1].loss:.3f}", "bold")]
        if self._held_out is not None:
            parts += [(", held-out ", ""), (f"{self._held_out:.3f}", "bold magenta")]
        parts += [("   ", ""), (f"{tokens / seconds:,.0f}", "bold"), (" tokens/s   NVMe ", "")]
        parts += [(f"{read / seconds / 1e9:.2f}", "bold green"), (" GB/s read, ", "")]
        parts += [(f"{written / seconds / 1e9:.2f}", "bold yellow"), (" written", "")]
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

"""A record of each step, from the clock and the engine's ledger, and the totals of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from infinity.errors import StorageError
from infinity.observe.ledger import Ledger, Snapshot


@dataclass(frozen=True)
class StepRecord:
    """One training step; its fields are the keys of the metrics file. Of several ranks: mean loss, bytes added up."""

    step: int
    """Counts from 1, and goes on counting after a checkpoint was loaded."""
    loss: float
    """Mean cross entropy of the step's batch, in nats."""
    seconds: float
    tokens_per_second: float
    nvme_bytes_read: int
    nvme_bytes_written: int
    host_peak_bytes: int
    """Largest resident set of the processes until now."""
    device_peak_bytes: int


@dataclass
class Totals:
    """Sums over the measured steps. Seconds are this rank's; bytes and peaks are of all ranks."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    """Compute stood still until a transfer ended."""
    update_seconds: float = 0.0
    """The optimizer's kernel worked; most of it beside compute."""
    nvme_bytes_read: int = 0
    nvme_bytes_written: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass
class Meter:
    """Measures the steps between `start` and `finish_step`, so that evaluation in between is not counted."""

    ledger: Ledger
    tokens_per_step: int
    """Tokens of a step, on all ranks together."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values
    """(n,) float64 of each rank -> their sum, on every rank."""
    ranks: int = 1
    totals: Totals = field(default_factory=Totals)

    def start(self) -> None:
        """The next step begins now."""
        self._before = self.ledger.snapshot()

    def finish_step(self, step: int, loss: float) -> StepRecord:
        """The step has ended, with this rank's `loss`; the next one begins."""
        before = self._before
        self.start()
        spent = self._before - before
        record = self._record(step, loss, spent)
        total = self.totals
        total.steps += 1
        total.tokens += self.tokens_per_step
        total.seconds += spent.seconds
        total.wait_seconds += spent.wait_seconds
        total.update_seconds += spent.update_seconds
        total.nvme_bytes_read += record.nvme_bytes_read
        total.nvme_bytes_written += record.nvme_bytes_written
        total.host_peak_bytes, total.device_peak_bytes = record.host_peak_bytes, record.device_peak_bytes
        return record

    def measure(self, step: int, loss: float) -> StepRecord:
        """Return the record of a step that has not ended yet, with this rank's `loss`. Collective."""
        return self._record(step, loss, self.ledger.snapshot() - self._before)

    def _record(self, step: int, loss: float, spent: Snapshot) -> StepRecord:
        values = [loss, spent.nvme_bytes_read, spent.nvme_bytes_written]
        values += [self.ledger.host_peak_bytes, self.ledger.device_peak_bytes]
        losses, *counts = self.sum_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        read, written, host, device = (int(count) for count in counts)
        speed = self.tokens_per_step / spent.seconds
        return StepRecord(step, losses / self.ranks, spent.seconds, speed, read, written, host, device)


class MetricsFile:
    """A JSON object a line and step, in the file as soon as the step has ended. Each step has one line, whatever ended
    the job in between.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resume: int | None = None,
        last: StepRecord | None = None,
        *,
        sync: bool = False,
    ) -> None:
        """resume: the step that the job goes on from, after which lines are dropped; None: a new file. last: record of
        that step, written if the job ended before its line. sync: wait until each line has reached the drive.
        """
        self._sync = sync
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            written = 0 if resume is None else _cut(Path(path), resume)
            self._file = Path(path).open("w" if resume is None else "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                f"The metrics file {path} cannot be written: {error.strerror}. Name another one."
            ) from error
        if last is not None and written < last.step:
            self.write(last)

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")
        if self._sync:
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _cut(path: Path, step: int) -> int:
    """Drop the lines after `step`, and one that was cut short. Returns the last step that is left, or 0."""
    if not path.exists():
        return 0
    end = last = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                written = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                raise StorageError(f"{path} is no metrics file. Name another one.") from None
            if written > step:
                break
            end, last = end + len(line), written
        file.truncate(end)
    return last

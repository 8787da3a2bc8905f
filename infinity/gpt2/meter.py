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
from infinity.observe.ledger import Ledger


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
        values = [loss, spent.nvme_bytes_read, spent.nvme_bytes_written]
        values += [self.ledger.host_peak_bytes, self.ledger.device_peak_bytes]
        losses, *counts = self.sum_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        read, written, host, device = (int(count) for count in counts)

        total = self.totals
        total.steps += 1
        total.tokens += self.tokens_per_step
        total.seconds += spent.seconds
        total.wait_seconds += spent.wait_seconds
        total.update_seconds += spent.update_seconds
        total.nvme_bytes_read += read
        total.nvme_bytes_written += written
        total.host_peak_bytes, total.device_peak_bytes = host, device
        speed = self.tokens_per_step / spent.seconds
        return StepRecord(step, losses / self.ranks, spent.seconds, speed, read, written, host, device)


class MetricsFile:
    """A JSON object a line and step, on disk as soon as the step has ended. Resuming appends to what is there."""

    def __init__(self, path: str | os.PathLike[str], resume: bool = False) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("a" if resume else "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                f"The metrics file {path} cannot be written: {error.strerror}. Name another one."
            ) from error

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

"""A step's record is what the ledger counted between its start and its end, and nothing from in between."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from gpt2.meter import Meter, MetricsFile, StepRecord
from infinity.errors import StorageError
from infinity.observe.ledger import Ledger, Snapshot

KEYS = [
    "step", "loss", "seconds", "tokens_per_second", "nvme_bytes_read", "nvme_bytes_written", "host_peak_bytes",
    "device_peak_bytes",
]  # fmt: skip


class FakeLedger(Ledger):
    """Counters that a test sets."""

    def __init__(self) -> None:
        self.now = dict.fromkeys((f.name for f in fields(Snapshot)), 0.0)
        self.peaks = (1000, 50)

    def snapshot(self) -> Snapshot:
        return Snapshot(**self.now)  # type: ignore[arg-type]

    def work(self, **amounts: float) -> None:
        for key, amount in amounts.items():
            self.now[key] += amount

    @property
    def host_peak_bytes(self) -> int:
        return self.peaks[0]

    @property
    def device_peak_bytes(self) -> int:
        return self.peaks[1]


def test_work_outside_a_step_is_not_counted() -> None:
    ledger = FakeLedger()
    ledger.work(seconds=100, nvme_bytes_read=10**9)  # set-up
    meter = Meter(ledger, tokens_per_step=512)
    meter.start()
    ledger.work(seconds=2, wait_seconds=0.5, update_seconds=0.7, nvme_bytes_read=30, nvme_bytes_written=20)
    first = meter.finish_step(1, 5.5)
    ledger.work(seconds=4, nvme_bytes_read=7)
    second = meter.finish_step(2, 5.0)
    ledger.work(seconds=9, wait_seconds=9, update_seconds=9, nvme_bytes_read=10**9)  # evaluation
    meter.start()
    ledger.work(seconds=1)
    ledger.peaks = (2000, 60)
    third = meter.finish_step(3, 4.5)

    assert first == StepRecord(1, 5.5, 2.0, 256.0, 30, 20, 1000, 50)
    assert second == StepRecord(2, 5.0, 4.0, 128.0, 7, 0, 1000, 50)
    assert third == StepRecord(3, 4.5, 1.0, 512.0, 0, 0, 2000, 60)
    total = meter.totals
    assert (total.steps, total.tokens, total.seconds) == (3, 3 * 512, 7.0)
    assert (total.wait_seconds, total.update_seconds) == (0.5, 0.7)
    assert (total.nvme_bytes_read, total.nvme_bytes_written) == (37, 20)
    assert (total.host_peak_bytes, total.device_peak_bytes) == (2000, 60)


def test_of_several_ranks_the_mean_loss_and_the_sum_of_bytes() -> None:
    ledger = FakeLedger()
    other_rank = torch.tensor([3.0, 1.0, 2.0, 10.0, 20.0], dtype=torch.float64)
    meter = Meter(ledger, tokens_per_step=8, sum_over_ranks=lambda values: values + other_rank, ranks=2)
    meter.start()
    ledger.work(seconds=1, nvme_bytes_read=30, nvme_bytes_written=40)
    assert meter.finish_step(1, 2.0) == StepRecord(1, 2.5, 1.0, 8.0, 31, 42, 1010, 70)


def test_metrics_are_one_object_a_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "metrics.jsonl"
    record = StepRecord(1, 5.5, 2.0, 256.0, 30, 20, 1000, 50)
    with MetricsFile(path) as file:
        file.write(record)
        [line] = path.read_text().splitlines()  # before it is closed
        assert list(json.loads(line)) == KEYS and StepRecord(**json.loads(line)) == record
    with MetricsFile(path, resume=True) as file:
        file.write(record)
    assert len(path.read_text().splitlines()) == 2
    with MetricsFile(path) as file:
        file.write(record)
    assert len(path.read_text().splitlines()) == 1


def test_a_metrics_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"The metrics file .* cannot be written: Is a directory"):
        MetricsFile(tmp_path)


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def record(step: int) -> StepRecord:
    return StepRecord(step, 5.5, 2.0, 256.0, 30, 20, 1000, 50)


def test_resumed_metrics_have_each_step_once(tmp_path: Path) -> None:
    """Lines after the step that the job goes on from are dropped, and one that was cut short."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.write(record(step))
    with path.open("a") as cut_short:
        cut_short.write('{"step": 4, "lo')
    with MetricsFile(path, 3) as file:
        file.write(record(4))
    assert lines(path) == [1, 2, 3, 4]
    with MetricsFile(path, 2, sync=True) as file:
        file.write(record(3))
    assert lines(path) == [1, 2, 3]


def test_resumed_metrics_get_the_line_that_the_commit_has(tmp_path: Path) -> None:
    """A job that is killed after a commit, and before the line of its step."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(record(1))
    for _ in range(2):
        MetricsFile(path, 2, record(2)).__exit__(None, None, None)
    assert lines(path) == [1, 2]
    MetricsFile(tmp_path / "new.jsonl", 2, record(2)).__exit__(None, None, None)
    assert lines(tmp_path / "new.jsonl") == [2]


def test_resumed_metrics_refuse_another_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes\n")
    with pytest.raises(StorageError, match=r"notes.txt is no metrics file"):
        MetricsFile(path, 2)
    assert path.read_text() == "notes\n"

"""The closing table says what the totals say."""

import io
import re

import pytest
from rich.console import Console

from gpt2.duration import show_seconds
from gpt2.meter import Totals
from gpt2.report import closing_table, output_lines
from infinity.sizes import show_bytes, show_count

TOTALS = Totals(
    steps=300, tokens=614_400, seconds=90.0, wait_seconds=9.0, update_seconds=30.0,
    nvme_bytes_read=42_000_000_000, nvme_bytes_written=36_000_000_000, host_peak_bytes=912_000_000,
)  # fmt: skip


def rows(totals: Totals = TOTALS, width: int = 80, plain_bytes: int | None = None) -> dict[str, str]:
    file = io.StringIO()
    table = closing_table(
        totals,
        parameters=10_000_000,
        tier_bytes={"device": 0, "host": 64_000_000, "nvme": 120_000_000},
        losses={"held-out": 1.98},
        job_seconds=150.0,
        sample_seconds=12.0,
        plain_bytes=plain_bytes,
    )
    Console(file=file, width=width).print(table)
    cells = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in file.getvalue().splitlines())
    return {what: " ".join(rest[0].split()) if rest else "" for what, *rest in cells}


def test_every_figure() -> None:
    table = rows()
    assert table["parameters"] == "10 M 10,000,000"
    assert table["tokens"] == "614 k 300 steps"
    assert table["loss, held-out"] == "1.980 nats a token"
    assert table["nvme tier"] == "120 MB 12.00 bytes a parameter"
    assert table["host tier"] == "64.00 MB 6.40 bytes a parameter"
    assert table["peak host memory"] == "912 MB resident, with Python and torch"
    assert "peak device memory" not in table
    assert table["read per parameter and step"] == "14.00 B 140 MB a step"
    assert table["written per parameter and step"] == "12.00 B 120 MB a step"
    assert table["read in all"] == "42.00 GB 467 MB/s on average"
    assert table["whole job"] == "2:30 start-up, evaluation and saving too"
    assert table["sample"] == "0:12"
    assert table["steps"] == "0.300 s a step; 6,827 tokens/s, 1:30 in all"
    assert table["compute"] == "90% 270 ms a step, 1:21, Python too"
    assert table["I/O waited for"] == "10% 30 ms a step, 0:09"
    assert table["update"] == "33% 100 ms a step, 0:30, in parallel"


def test_need_of_a_plain_loop_stands_below_the_peak() -> None:
    assert "a plain loop's need" not in rows()
    assert rows(plain_bytes=2_280_000_000, width=100)["a plain loop's need"] == (
        "2.28 GB in host memory; this run took 40% of it"
    )


def test_a_run_of_no_step_divides_by_nothing() -> None:
    assert rows(Totals())["read per parameter and step"] == "0.00 B 0 B a step"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(0), "0 B"),
        (show_bytes(999), "999 B"),
        (show_bytes(1_300_000_000), "1.30 GB"),
        (show_bytes(912_000_000), "912 MB"),
        (show_bytes(5.2e12), "5.20 TB"),
        (show_bytes(1.2e15), "1.20 PB"),
        (show_count(10_844_160), "10.8 M"),
        (show_count(12), "12"),
        (show_seconds(92.4), "1:32"),
        (show_seconds(59.6), "1:00"),
        (show_seconds(7322), "2:02:02"),
    ],
)
def test_numbers_with_units(shown: str, expected: str) -> None:
    assert shown == expected


def test_paths_of_any_length_stay_in_one_line() -> None:
    lines = output_lines([("checkpoint", "/long" * 40), ("sample", "sample.txt")])
    assert lines == ["left on disk", "  checkpoint  " + "/long" * 40, "  sample      sample.txt"]
    assert output_lines([]) == []

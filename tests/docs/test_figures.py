"""Figures of README.md and docs/performance.md agree with each other, and their ratios can be recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import infinity.deepspeed

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench" / "results").glob("*.md")])


def tables(page: str) -> list[list[list[str]]]:
    """Rows of cells of each table of a page, the header first and without the line of dashes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    cells = [[[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows] for rows in found]
    return [[rows[0], *rows[2:]] for rows in cells]


def table(page: str, *columns: str) -> list[dict[str, str]]:
    """Rows of the only table of a page that has these columns."""
    (rows,) = (rows for rows in tables(page) if set(columns) <= set(rows[0]))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def test_steps_on_nvme_are_beside_the_plain_loop_above_them() -> None:
    plain = 0.0
    for row in table("docs/performance.md", "clipping", "step", "÷ plain", "single rounds"):
        (seconds,), (ratio,) = numbers(row["step"]), numbers(row["÷ plain"])
        plain = seconds if row["loop"].startswith("plain") else plain
        assert ratio == pytest.approx(seconds / plain, abs=0.005), row


def test_steps_within_a_budget_are_beside_the_plain_loop_of_their_row() -> None:
    for row in table("docs/performance.md", "budget for states and buffers", "plain loop", "÷ plain"):
        assert numbers(row["÷ plain"])[0] == pytest.approx(
            numbers(row["step"])[0] / numbers(row["plain loop"])[0], abs=0.005
        ), row
        gib, gigabytes = numbers(re.sub(r"\(.*?\)", "", row["budget for states and buffers"]))
        assert gigabytes == pytest.approx(gib * 2**30 / 1e9, abs=0.005)
        assert numbers(row["peak RSS"])[0] - gigabytes == pytest.approx(0.95, abs=0.001)  # as the page says


def test_steps_of_ranks_are_beside_the_peer_in_their_cell() -> None:
    for row in table("docs/performance.md", "Infinity", "÷ peer"):
        ours, peers = numbers(row["step"])
        assert numbers(row["÷ peer"])[0] == pytest.approx(ours / peers, abs=0.005), row


def test_ratios_of_steps_are_quotients_of_their_columns() -> None:
    """The pages that bench/step.py draws."""
    for name in ("step", "step_4GiB", "step_1.5GiB", "step_io"):
        rows = {row[""]: row for row in table(f"bench/results/{name}.md", "")}
        above = rows["step, s"]
        for text, below in {
            "ratio to plain": "plain in-memory loop, s",
            "ratio to bound": "bound, s",
            "ratio to bytes ÷ disk": "bytes ÷ disk, s",
        }.items():
            for column in set(above) - {""}:
                ratio, *_ = numbers(rows[text][column])
                assert ratio == pytest.approx(float(above[column]) / float(rows[below][column]), abs=0.006), (
                    name,
                    text,
                )


def test_the_first_screen_shows_the_figures_beside_deepspeed() -> None:
    columns = {
        "plain PyTorch": "plain PyTorch, in host memory",
        "DeepSpeed 0.19.8": "DeepSpeed",
        "Infinity": "Infinity",
    }
    shown = table("README.md", *columns)
    measured = table("docs/deepspeed_gains.md", *columns.values())
    pairs = {"memory": "peak of resident", "time of a step": "time of a step", "first start": "first start"}
    for text, source in pairs.items():
        (mine,) = (row for row in shown if text in row[""])
        (theirs,) = (row for row in measured if source in row[""])
        found = [numbers(mine[column])[0] for column in columns]
        assert found == [numbers(theirs[column])[0] for column in columns.values()], text


def test_figures_beside_deepspeed_are_those_that_were_measured() -> None:
    rows = table("bench/results/beside_deepspeed.md", "plain PyTorch", "DeepSpeed", "Infinity")
    measured = {row.pop(""): row for row in rows}
    columns = {"plain PyTorch": "plain PyTorch, in host memory", "DeepSpeed": "DeepSpeed", "Infinity": "Infinity"}
    shown = {row[""]: row for row in table("docs/deepspeed_gains.md", *columns.values())}
    for text, name in {
        "peak of resident memory, Python and torch included": "NVMe: peak RSS, GB",
        "time of a step": "NVMe: step, s",
        "from the import to the end of the first step": "NVMe: start, s",
        "the same, at the first start on a machine": "first start on a machine, s",
    }.items():
        in_memory = f"host memory: {name.partition(': ')[2] or 'start, s'}"  # plain PyTorch compiles at no start
        for column, title in columns.items():
            row = in_memory if column == "plain PyTorch" else name
            assert numbers(shown[text][title])[0] == float(measured[row][column]), (text, column)


def test_pages_name_one_version_of_deepspeed() -> None:
    version = infinity.deepspeed.__version__.partition("+")[0]
    family = re.escape(version.rpartition(".")[0])
    for path in PAGES:
        found = set(re.findall(rf"(?<![\d.]){family}\.\d+\b", path.read_text(encoding="utf-8")))
        assert found <= {version}, path

"""File I/O of infinity's engine beside fio's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Result, Spread, grouped, median, spread
from report.page import Report, setup, table
from report.style import INK, LABEL, OURS, PALE, PEER, dress, new_figure, save

OPS = ("read", "write", "mixed")
TITLES = {"128k": "128 KiB × 32", "1m": "1 MiB × 32", "8m": "8 MiB × 8", "tiles": "10 MiB tiles"}
"""Points: block size × queue depth, and the update's own pattern."""
COLOURS = {
    "fio libaio": "#c9ced6",
    "fio io_uring": PEER,
    "fio io_uring, registered": "#6b7280",
    "ours libaio": PALE,
    "ours io_uring": OURS,
}
LEGEND = "Medians in 10^9 bytes a second, the smallest and the largest in brackets. Point: block size × queue depth."
LAST_ROW = (
    "In the last row, fio runs 1 MiB × 32, mixed; ours are requests of 10 MiB, which the engine cuts into blocks of "
    "1 MiB, 32 in flight."
)


@dataclass(frozen=True)
class Figures:
    """Figures of one kind of run at one point."""

    gb_per_s: Spread
    cpu_s_per_gb: float


Runs = Mapping[str, Figures]


def points(result: Result) -> dict[tuple[str, str], dict[str, Figures]]:
    """By (point, op), then by kind of run."""
    found: dict[tuple[str, str], dict[str, Figures]] = {}
    for (point, op, who), samples in grouped(result["samples"], "point", "op", "who").items():
        figures = Figures(spread(s["gb_per_s"] for s in samples), median(samples, "cpu_s_per_gb"))
        found.setdefault((point, op), {})[who] = figures
    return found


def figures_of(runs: Runs, who: str) -> Figures | None:
    """Return the figures of a kind of run: over tiles, if there are such runs."""
    return runs.get(f"{who}, tiles", runs.get(who))


def fastest_fio(runs: Runs) -> str:
    return max((who for who in runs if who.startswith("fio")), key=lambda who: runs[who].gb_per_s.median)


def over_fio(runs: Runs) -> float:
    """Speed of ours over the fastest of fio's; io_uring, which `aio.engine: auto` takes."""
    ours = figures_of(runs, "ours io_uring")
    assert ours is not None
    return ours.gb_per_s.median / runs[fastest_fio(runs)].gb_per_s.median


# -- the page ----------------------------------------------------------------------------------------------------------


def show_speed(one: Figures | None) -> str:
    return "" if one is None else "{:.2f} ({:.2f}–{:.2f})".format(*one.gb_per_s)


def show_cpu(one: Figures | None) -> str:
    return "" if one is None else f"{one.cpu_s_per_gb:.4f}"


def speed_table(found: Mapping[tuple[str, str], Runs]) -> str:
    header = ["point", "operation", *COLOURS, "best of fio", "ours (io_uring) ÷ best of fio"]
    rows = [
        [TITLES[point], op, *(show_speed(figures_of(runs, who)) for who in COLOURS), fastest_fio(runs),
         f"**{over_fio(runs):.2f}**"]
        for (point, op), runs in found.items()
    ]  # fmt: skip
    return table(header, rows)


def cpu_table(found: Mapping[tuple[str, str], Runs]) -> str:
    rows = [
        [TITLES[point], op, *(show_cpu(figures_of(runs, who)) for who in COLOURS)]
        for (point, op), runs in found.items()
    ]
    return table(["point", "operation", *COLOURS], rows)


def checksum(found: Mapping[tuple[str, str], Runs]) -> str:
    runs = found["tiles", "mixed"]
    off, on = runs["ours io_uring, tiles"], runs["ours io_uring, tiles, checksum"]
    return (
        f"With `aio.checksum`, tiles reach {on.gb_per_s.median:.2f} instead of {off.gb_per_s.median:.2f} GB/s "
        f"({on.gb_per_s.median / off.gb_per_s.median:.2f} ×), and take {on.cpu_s_per_gb:.4f} instead of "
        f"{off.cpu_s_per_gb:.4f} CPU seconds per GB."
    )


def fragments(result: Result) -> dict[str, str]:
    found = points(result)
    speed = f"{LEGEND}\n\n{speed_table(found)}\n\n{LAST_ROW}"
    return {"setup": setup(result), "speed": speed, "cpu": cpu_table(found), "checksum": checksum(found)}


def figures(result: Result) -> dict[str, float]:
    return {f"{point} {op}: ours ÷ fastest fio": over_fio(runs) for (point, op), runs in points(result).items()}


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> None:
    """Bars by point: speed above, CPU below, a column for each op."""
    found = points(result)
    subtitle = "O_DIRECT, one thread; medians, lines from smallest to largest"
    figure = new_figure(11.5, 6.6, title="Overwriting and reading a laid-out file", subtitle=subtitle)
    for column, op in enumerate(OPS):
        shown = {TITLES[point]: runs for (point, its), runs in found.items() if its == op}
        for row, unit in enumerate(("GB/s", "CPU seconds per GB")):
            axes = figure.add_axes((0.06 + 0.315 * column, 0.525 - 0.40 * row, 0.285, 0.31))
            draw_bars(axes, shown, is_speed=row == 0)
            if row == 0:
                axes.set_title(op, loc="left", fontsize=11, weight="bold", color=INK)
            if column == 0:
                axes.set_ylabel(unit, color=LABEL, fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=5, frameon=False, fontsize=9)
    save(figure, path)


def draw_bars(axes: Any, shown: Mapping[str, Runs], *, is_speed: bool) -> None:
    for index, (who, colour) in enumerate(COLOURS.items()):
        bars = [(place, one) for place, runs in enumerate(shown.values()) if (one := figures_of(runs, who)) is not None]
        at = [place + (index - 2) * 0.16 for place, _ in bars]
        heights = [one.gb_per_s.median if is_speed else one.cpu_s_per_gb for _, one in bars]
        axes.bar(at, heights, width=0.145, color=colour, label=who)
        if is_speed:
            axes.vlines(
                at, [one.gb_per_s.low for _, one in bars], [one.gb_per_s.high for _, one in bars], INK, linewidth=0.9
            )
    axes.set_xticks(range(len(shown)), list(shown), fontsize=8)
    dress(axes, "y")


REPORT = Report(lambda result: "File I/O: infinity beside fio", fragments, figures, plot, "GB/s and CPU")

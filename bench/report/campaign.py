"""The page of `campaign.py`: what trainings under random faults ended with."""

from __future__ import annotations

from pathlib import Path

from harness import Result
from report import style
from report.page import Report, setup, table

SAME, REFUSED = "same numbers", "refused"
COLOURS = {SAME: "#2f6fde", REFUSED: "#9ca3af", "failed": "#dc2626"}


def total(result: Result, name: str) -> int:
    return sum(row.get(name, 0) for row in result["kinds"].values())


def failed(row: dict[str, int]) -> int:
    return row["runs"] - row.get(SAME, 0) - row.get(REFUSED, 0)


def middle(result: Result) -> float:
    """Median seconds until a process that goes on has its states back."""
    seconds = result["recovery"]
    return float(seconds[len(seconds) // 2]) if seconds else 0.0


def title(result: Result) -> str:
    """Without a number: an existing page keeps its title."""
    return "Trainings under random faults"


def fragments(result: Result) -> dict[str, str]:
    first = result["args"]["first"]
    text = setup(
        result,
        f"Trainings number {first:,} to {first + total(result, 'runs') - 1:,}, of a model of 20,701 parameters.",
        "Each has 6 steps, in one of several placements, formats and schedules.",
        "`python bench/campaign.py --show NUMBER` repeats one.",
    )
    return {"setup": text, "outcomes": outcomes(result), "failed": failures(result), "recovery": recovery(result)}


def outcomes(result: Result) -> str:
    names = ("runs", "two ranks", "kills", "resumed", SAME, REFUSED)
    rows = [
        [kind, *(f"{row.get(name, 0):,}" for name in names), f"{failed(row):,}"]
        for kind, row in sorted(result["kinds"].items())
    ]
    rows.append(["all", *(f"{total(result, name):,}" for name in names), f"{len(result['failed']):,}"])
    head = ["fault", "trainings", "on two ranks", "processes killed", "resumed from a commit", SAME, REFUSED, "failed"]
    return table(head, rows)


def failures(result: Result) -> str:
    if not result["failed"]:
        return "No training failed: none had another number, an error without its cause, a crash, or a file left over."
    rows = [[str(seed), kind, outcome, text[:100].replace("\n", " ")] for seed, kind, outcome, text in result["failed"]]
    return table(["number", "fault", "outcome", "text"], rows)


def recovery(result: Result) -> str:
    seconds = result["recovery"]
    if not seconds:
        return "No training resumed."
    high = seconds[int(0.99 * (len(seconds) - 1))]
    return (
        f"A process that goes on has its states back {middle(result):.2f} s after its start in the median, and within "
        f"{high:.2f} s in 99 % of {len(seconds):,} starts. torch is loaded before."
    )


def figures(result: Result) -> dict[str, float]:
    return {"trainings that failed": float(len(result["failed"]))}


def plot(result: Result, path: Path) -> None:
    kinds = sorted(result["kinds"], key=lambda kind: result["kinds"][kind]["runs"])
    subtitle = "trainings by the fault that was injected, and what they ended with"
    heading = f"{total(result, 'runs'):,} trainings under random faults"
    figure = style.new_figure(9, 1.6 + 0.28 * len(kinds), title=heading, subtitle=subtitle)
    axes = figure.add_axes((0.24, 0.1, 0.72, 0.74))
    left = [0] * len(kinds)
    for name, colour in COLOURS.items():
        rows = [result["kinds"][kind] for kind in kinds]
        widths = [failed(row) if name == "failed" else row.get(name, 0) for row in rows]
        axes.barh(range(len(kinds)), widths, left=left, color=colour, height=0.7, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(kinds)), kinds)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    style.dress(axes, "x")
    style.save(figure, path)


REPORT = Report(title, fragments, figures, plot, "Outcomes of trainings by fault")

"""Predictions of the planner beside what real runs took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Result, median, spread
from report import style
from report.page import Report, setup, table

_RETURNED = "peak, blocks returned"
WITHIN = {"peak": 0.05, _RETURNED: 0.05, "read": 0.01, "written": 0.01, "step": 0.15}
"""Figure → the largest deviation that counts as right."""
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def compared(result: Result) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Yield kind, and figure → (predicted, measured). Figures of which both are 0 are left out."""
    for kind, runs in result["runs"].items():
        predicted = [run["predicted"] for run in runs]
        steps = [one["step"] for one in predicted]
        pairs = {
            "peak": (median(predicted, "peak_host_bytes"), median(runs, "peak_rss")),
            "read": (median(steps, "nvme_bytes_read"), median(runs, "read")),
            "written": (median(steps, "nvme_bytes_written"), median(runs, "written")),
            "step": (median(steps, "seconds"), spread(s for run in runs for s in run["seconds"]).median),
        }
        if "peak_returned" in runs[0]:
            pairs[_RETURNED] = pairs["peak"][0], median(runs, "peak_returned")
        yield kind, {name: pair for name, pair in pairs.items() if any(pair)}


def deviation(pair: tuple[float, float]) -> float:
    """Predicted ÷ measured − 1."""
    predicted, measured = pair
    return predicted / measured - 1 if measured else float("inf")


def figures(result: Result) -> dict[str, float]:
    return {f"{kind}: {name}": abs(deviation(pair)) for kind, pairs in compared(result) for name, pair in pairs.items()}


def title(result: Result) -> str:
    return "Predicted and measured: memory, bytes and seconds of a step"


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result, *recipe(result)), "summary": summary(result), "table": rows_of(result)}


def recipe(result: Result) -> list[str]:
    return [
        "Predicted by `infinity plan --this-machine` right after each run, with bandwidths measured once a round.",
        f"Measured: medians of {result['rounds']} × {result['steps']} steps, each round in processes of its own, kinds "
        "interleaved.",
    ]


def summary(result: Result) -> str:
    found: dict[str, list[float]] = {name: [] for name in WITHIN}
    for _, pairs in compared(result):
        for name, pair in pairs.items():
            found[name].append(abs(deviation(pair)))
    rows = [
        [
            name,
            f"{limit:.0%}",
            f"{sum(value <= limit for value in found[name])} of {len(found[name])}",
            f"{spread(found[name]).median:.1%}",
            f"{max(found[name]):.1%}",
        ]
        for name, limit in WITHIN.items()
        if found[name]
    ]
    return table(["figure", "deviation", "runs within it", "median deviation", "largest deviation"], rows)


def rows_of(result: Result) -> str:
    every = list(compared(result))
    names = [name for name in WITHIN if any(name in pairs for _, pairs in every)]
    header = ["run", *(f"{name}, {'s' if name == 'step' else 'MB'}" for name in names)]
    rows = [[kind, *(cell(pairs.get(name), name) for name in names)] for kind, pairs in every]
    return f"Predicted / measured, and the deviation.\n\n{table(header, rows)}"


def cell(pair: tuple[float, float] | None, name: str) -> str:
    if pair is None:
        return "–"
    digits, unit = (2, 1.0) if name == "step" else (0, 1e6)
    values = " / ".join(f"{value / unit:.{digits}f}" for value in pair)
    return f"{values} ({deviation(pair):+.1%})"


def plot(result: Result, path: Path) -> None:
    """One panel for each of peak and step: predicted over measured, the diagonal, and the limits."""
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = style.new_figure(
        9, 4.6, title="Predicted and measured", subtitle="one dot a run; the band is the limit of the deviation"
    )
    for number, (name, unit, what) in enumerate((("peak", 1e9, "peak memory, GB"), ("step", 1.0, "step, s"))):
        axes: Any = figure.add_axes((0.08 + 0.48 * number, 0.13, 0.4, 0.67))
        pairs = [pairs[name] for _, pairs in compared(result)]
        measured = [pair[1] / unit for pair in pairs]
        ends = [0.8 * min(measured), 1.25 * max(measured)]
        axes.fill_between(
            ends, *([end * (1 + sign * WITHIN[name]) for end in ends] for sign in (-1, 1)), color=style.GRID
        )
        axes.plot(ends, ends, color=style.PEER, linewidth=1)
        axes.scatter(measured, [pair[0] / unit for pair in pairs], s=18, color=style.OURS, zorder=3)
        axes.set(xscale="log", yscale="log", xlabel=f"measured {what}", ylabel=f"predicted {what}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([tick for tick in _TICKS if ends[0] <= tick <= ends[1]]))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        style.dress(axes)
    style.save(figure, path)


REPORT = Report(title, fragments, figures, plot, "predicted over measured peak memory and seconds of a step")

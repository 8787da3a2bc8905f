"""Resources of long trainings over time, and their growth."""

from __future__ import annotations

import statistics
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from harness import Result
from report import style
from report.page import Report, setup, table


class Resource(NamedTuple):
    title: str
    unit: float
    """The table's figures are multiples of it."""
    limit: float
    """Most growth, in the same unit, over the part of a run that is judged."""
    per_step: float = 0.0
    """Growth allowed for each step of that part, beside `limit`."""


RESOURCES = {
    "rss": Resource("resident memory, MB", 1e6, 8.0),
    "heap": Resource("malloc in use, kB", 1e3, 64.0, 0.016),
    "python_objects": Resource("Python objects", 1.0, 250.0, 0.1),
    "descriptors": Resource("descriptors", 1.0, 0.5),
    "threads": Resource("threads", 1.0, 0.5),
    "pinned": Resource("pinned, kB", 1e3, 0.5),
    "disk": Resource("disk of states, kB", 1e3, 0.5),
}


def judged(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """Samples without the first quarter of the run, in which caches and allocators fill."""
    return [sample for sample in samples if 4 * sample["step"] >= samples[-1]["step"]]


def slope(points: list[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between all pairs of points. 0 for fewer than two."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0


def growth(samples: list[dict[str, float]], name: str) -> float:
    """Growth of a resource over the judged part of a run, in the unit of its table."""
    part = judged(samples)
    rate = slope([(sample["step"], sample[name]) for sample in part])
    return rate * (part[-1]["step"] - part[0]["step"]) / RESOURCES[name].unit


def allowed(samples: list[dict[str, float]], name: str) -> float:
    part, resource = judged(samples), RESOURCES[name]
    return resource.limit + resource.per_step * (part[-1]["step"] - part[0]["step"])


def excesses(result: Result) -> list[str]:
    """A sentence for each resource that grew by more than its limit."""
    found = []
    for kind, one in result["runs"].items():
        for name, resource in RESOURCES.items():
            grown, limit = growth(one["samples"], name), allowed(one["samples"], name)
            if grown > limit:
                found.append(f"{kind}: {resource.title} grew by {grown:.4g}, more than {limit:.4g}.")
    return found


def any_run(result: Result) -> dict[str, Any]:
    return dict(next(iter(result["runs"].values())))


def title(result: Result) -> str:
    hours = sum(run["samples"][-1]["seconds"] for run in result["runs"].values()) / 3600
    length = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    return f"{length} of steps with states on NVMe"


def recipe(result: Result) -> list[str]:
    args, first = result["args"], any_run(result)["samples"][0]
    return [
        f"GPT-2 of {any_run(result)['parameters'] / 1e6:.2f} M parameters: hidden {args['hidden']}, {args['layers']} "
        f"layers, sequence {args['sequence']}, batch {args['batch']}; a process for each configuration.",
        f"Every {args['cycle']} steps a checkpoint in the background and an evaluation; first reading after "
        f"{first['step']:g} steps.",
    ]


def figure_cell(samples: list[dict[str, float]], name: str) -> str:
    """The last reading, and the growth up to it."""
    last, grown = samples[-1][name] / RESOURCES[name].unit, growth(samples, name)
    return f"{last:,.0f} ({grown:+,.1f})" if round(grown, 1) else f"{last:,.0f} (0)"


def fragments(result: Result) -> dict[str, str]:
    runs = result["runs"]
    rows = [["steps", *(f"{run['samples'][-1]['step']:,.0f}" for run in runs.values())]]
    for name, resource in RESOURCES.items():
        rows.append([resource.title, *(figure_cell(run["samples"], name) for run in runs.values())])
    for key, text in (("calm", "step"), ("beside_save", "step beside a save")):
        rows.append([f"{text}, ms", *(f"{1000 * run[key]['p50']:.1f}" for run in runs.values())])
        rows.append([f"{text}, p99 ÷ median", *(f"{tail(run[key]):.2f}" for run in runs.values())])
    legend = "Last reading, in brackets the growth over the last three quarters of the run."
    return {"setup": setup(result, *recipe(result)), "table": f"{legend}\n\n{table(['', *runs], rows)}"}


def tail(times: dict[str, float]) -> float:
    """p99 of the steps over their median."""
    return times["p99"] / times["p50"] if times["count"] else 0.0


def figures(result: Result) -> dict[str, float]:
    found = {}
    for kind, run in result["runs"].items():
        for name, resource in RESOURCES.items():
            found[f"{kind}: growth of {resource.title}"] = growth(run["samples"], name)
        found[f"{kind}: p99 ÷ median of a step"] = tail(run["calm"])
    return found


def plot(result: Result, path: Path) -> None:
    """A row for each resource, a line for each configuration."""
    colours = [style.OURS, style.PALE, style.PEER, style.INK]
    lines = [(colour, dashes) for dashes in ("-", "--") for colour in colours]
    height = 1.5 + 1.15 * len(RESOURCES)
    subtitle = "Readings at the end of a cycle of steps, checkpoint and evaluation"
    figure = style.new_figure(8, height, title=title(result), subtitle=subtitle, left=0.04)
    grid = figure.add_gridspec(len(RESOURCES), 1, left=0.1, right=0.97, top=1 - 1.3 / height, bottom=0.5 / height)
    for row, (name, resource) in enumerate(RESOURCES.items()):
        axes = figure.add_subplot(grid[row])
        for (colour, dashes), (kind, run) in zip(lines, result["runs"].items(), strict=False):
            steps = [sample["step"] for sample in run["samples"]]
            values = [sample[name] / resource.unit for sample in run["samples"]]
            parts = [step / steps[-1] for step in steps]
            axes.plot(parts, values, color=colour, linestyle=dashes, linewidth=1.4, label=kind)
        style.dress(axes, "y")
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        axes.set_title(resource.title, loc="left", fontsize=8, color=style.LABEL, pad=2)
        axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1], 1))
        axes.set_xlim(0, 1)
        axes.tick_params(labelbottom=row == len(RESOURCES) - 1)
        axes.yaxis.get_major_locator().set_params(nbins=3)
        if row == 0:
            axes.legend(ncols=2, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0.18, 1.0))
    axes.set_xlabel("part of the run", fontsize=8, color=style.LABEL)
    figure.subplots_adjust(hspace=0.6)
    style.save(figure, path)


REPORT = Report(title, fragments, figures, plot, "Resources over the run")

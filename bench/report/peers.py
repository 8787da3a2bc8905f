"""A training step in Infinity beside other engines that offload: time, peak memory, bytes on the drive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Result, spread
from peers.contenders import PEERS
from report.page import RATIOS, Report, ratio, setup, table
from report.style import LABEL, MUTED, OURS, PEER, dress, new_figure, save


@dataclass(frozen=True)
class Row:
    """Figures of a contender for one shape; `reason` if it did not run."""

    name: str
    title: str
    reason: str = ""
    seconds: float = 0.0
    ratio: str = ""
    """To the plain loop, with the range within rounds."""
    peak_rss: float = 0.0
    read: float = 0.0
    written: float = 0.0


def rows(result: Result, shape: str) -> list[Row]:
    kinds = [kind.partition(", ")[2] for kind in result["runs"] if kind.startswith(f"{shape}, ")]
    return [row(result, shape, name) for name in kinds]


def row(result: Result, shape: str, name: str) -> Row:
    runs = result["runs"][f"{shape}, {name}"]
    title = PEERS[name].title
    if known := runs[0].get("version"):
        title = title.replace(",", f" {known},", 1)
    if reasons := [run["reason"] for run in runs if "reason" in run]:
        return Row(name, title, reasons[0])
    peers = result["runs"].get(f"{shape}, plain", [])
    own, plain = (spread(second for run in each for second in run["steps"]).median for each in (runs, peers or runs))
    rounds = [seconds(run) / seconds(peer) for run, peer in zip(runs, peers, strict=True)] if peers else []
    return Row(
        name,
        title,
        seconds=own,
        ratio=ratio(f"{own:.3g}", f"{plain:.3g}", rounds) if rounds else "",
        peak_rss=max(run["peak_rss"] for run in runs),
        read=spread(run["read"] for run in runs).median,
        written=spread(run["written"] for run in runs).median,
    )


def seconds(run: Mapping[str, Any]) -> float:
    return spread(run["steps"]).median


# -- the page ----------------------------------------------------------------------------------------------------------


def shape_title(result: Result, name: str) -> str:
    shape = result["shapes"][name]
    return (
        f"{name}: {shape['parameters'] / 1e6:.3g} M parameters, hidden {shape['hidden']}, {shape['layers']} layers, "
        f"vocabulary {shape['vocab']}, sequence {shape['sequence']}, batch {shape['batch']}"
    )


def shape_table(result: Result, name: str) -> str:
    header = ["", "step, s", "÷ plain", "peak RSS, GB", "read, MB a step", "written, MB a step"]
    return f"{shape_title(result, name)}.\n\n{table(header, map(cells, rows(result, name)))}"


def cells(one: Row) -> list[str]:
    if one.reason:
        return [one.title, f"did not run: `{one.reason}`", *[""] * 4]
    moved = (f"{value / 1e6:.0f}" for value in (one.read, one.written))
    return [one.title, f"{one.seconds:.3g}", one.ratio, f"{one.peak_rss / 1e9:.2f}", *moved]


def recipe(result: Result) -> list[str]:
    return [
        "GPT-2 with an untied head, one process on the CPU, computing in bf16 with fp32 masters and moments; AdamW, no "
        "clipping.",
        f"Medians of {result['rounds']} processes of {result['steps']} steps each, after {result['warm_up']} that warm "
        "up, the contenders in turns.",
        RATIOS,
        "Peak RSS: the largest of all processes, with Python, torch and the construction of the model.",
        "Bytes: the kernel's count for the process (`/proc/self/io`), from the fourth step on.",
        f"All losses agree within {result['apart']:.0e}.",
    ]


def title(result: Result) -> str:
    return "A training step beside DeepSpeed, FSDP2 and torchao"


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result, *recipe(result))} | {name: shape_table(result, name) for name in result["shapes"]}


# -- the plot ----------------------------------------------------------------------------------------------------------

PANELS: dict[str, tuple[float, Callable[[Row], tuple[float, ...]]]] = {
    "seconds a step": (1.0, lambda one: (one.seconds,)),
    "peak RSS, GB": (1e9, lambda one: (one.peak_rss,)),
    "GB a step on the drive: read, and written (pale)": (1e9, lambda one: (one.read, one.written)),
}
"""Title → unit, and the parts of a bar."""


def plot(result: Result, path: Path) -> None:
    """One line of panels a shape; a bar for each contender in each panel."""
    shapes = {name: rows(result, name)[::-1] for name in result["shapes"]}
    heights = {name: 0.32 * len(found) + 0.75 for name, found in shapes.items()}
    height = sum(heights.values()) + 1.0
    figure = new_figure(
        12, height, title=title(result), subtitle="one process on the CPU; medians; lower is better", left=0.02
    )
    top = 1 - 0.75 / height
    for name, found in shapes.items():
        bottom = top - heights[name] / height
        figure.text(0.02, top - 0.18 / height, shape_title(result, name), fontsize=9, color=LABEL)
        area = (bottom + 0.25 / height, (heights[name] - 0.75) / height)
        for number, text in enumerate(PANELS):
            axes = figure.add_axes((0.25 + 0.255 * number, area[0], 0.2, area[1]))
            figure.text(0.25 + 0.255 * number, top - 0.4 / height, text, fontsize=8, color=MUTED)
            draw_panel(axes, found, text, names=number == 0)
        top = bottom
    save(figure, path)


def draw_panel(axes: Any, found: list[Row], text: str, *, names: bool) -> None:
    unit, parts_of = PANELS[text]
    for place, one in enumerate(found):
        parts = [part / unit for part in parts_of(one)]
        colour = OURS if one.name.startswith("infinity") else PEER
        for number, part in enumerate(parts):
            axes.barh(place, part, left=sum(parts[:number]), height=0.66, color=colour, alpha=1 - 0.5 * number)
        label = ("did not run" if names else "") if one.reason else f"{sum(parts):.3g}"
        axes.text(sum(parts), place, f"  {label}", va="center", fontsize=8, color=LABEL)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xlim(0, 1.25 * max(sum(parts_of(one)) / unit for one in found) or 1)
    axes.set_yticks(range(len(found)), [one.title for one in found] if names else [""] * len(found), fontsize=8)
    dress(axes, "x")


REPORT = Report(title, fragments, plot=plot, caption="Seconds, peak memory and bytes of a step by contender and shape")

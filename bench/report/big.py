"""A Llama larger than memory, trained from a drive."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from harness import Result, spread
from report.page import Report, setup, table
from report.style import MUTED, PEER, Bar, draw_bars, new_figure, save

WARM_UP = 3
"""Steps that are not counted: the first records the trace, and bytes of gradients are freed after the third."""


def drives(result: Result) -> list[float]:
    """Bytes/s of the drive around each counted step: the mean of before and after it."""
    return [(before + after) / 2 for before, after in pairwise(result["mixed"][WARM_UP:])]


def transfers(result: Result) -> list[float]:
    """Seconds of a step's bytes at the drive's mixed bandwidth, for each counted step."""
    return [float(result["read"] + result["written"]) / rate for rate in drives(result)]


def ratios(result: Result) -> list[float]:
    """Time ÷ bound of each counted step."""
    own = [step["seconds"] for step in result["steps"][WARM_UP:]]
    bounds = [max(result["compute"], moved) for moved in transfers(result)]
    return [taken / bound for taken, bound in zip(own, bounds, strict=True)]


def seconds(result: Result) -> float:
    """Median of the counted steps."""
    return spread(step["seconds"] for step in result["steps"][WARM_UP:]).median


def bound(result: Result) -> float:
    """Median of the counted steps' bounds, in seconds."""
    return spread(max(result["compute"], moved) for moved in transfers(result)).median


def figures(result: Result) -> dict[str, float]:
    parameters, made = result["parameters"], result["construction"]
    return {
        # A quotient of the cells that the table shows.
        "step ÷ bound": round(seconds(result), 1) / round(bound(result), 1),
        "construction ÷ written at the drive's speed": made["seconds"] / (made["written"] / result["write"]),
        "peak RSS, GB": result["peak_rss"] / 1e9,
        "read, bytes a parameter": result["read"] / parameters,
        "written, bytes a parameter": result["written"] / parameters,
        "stored on the drive, bytes a parameter": result["drive"] / parameters,
    }


def title(result: Result) -> str:
    return f"A Llama of {result['parameters'] / 1e9:.1f} B parameters, trained from a drive"


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result, *recipe(result)), "table": rows_of(result)}


def recipe(result: Result) -> list[str]:
    args = result["args"]
    return [
        f"Width {args['hidden']}, {args['layers']} layers, random weights, bf16, 8-bit moments, checkpointed "
        f"blocks, batch 1, sequence {args['sequence']}, all states on nvme, "
        f"{args['prefetch']} fetched ahead.",
        f"The control group has {args['limit']} of memory; its peak with page cache is {result['group'] / 1e9:.2f} GB."
        if result["group"]
        else "No control group bounds the process.",
    ]


def rows_of(result: Result) -> str:
    made = result["construction"]
    losses = [step["loss"] for step in result["steps"]]
    rows = {
        "step, s": f"{seconds(result):.1f}",
        "compute, s": f"{result['compute']:.1f}",
        "bytes of a step ÷ drive, mixed, s": f"{spread(transfers(result)).median:.1f}",
        "drive, mixed, around each step, GB/s": ", ".join(f"{rate / 1e9:.2f}" for rate in drives(result)),
        "each step ÷ its bound": ", ".join(f"{each:.2f}" for each in ratios(result)),
        "drive, write, GB/s": f"{result['write'] / 1e9:.2f}",
        "construction, s": f"{made['seconds']:.1f}",
        "written by the construction, GB": f"{made['written'] / 1e9:.1f}",
        "loss, first and last": f"{losses[0]:.3f}, {losses[-1]:.3f}",
        **{name: f"{value:.2f}" for name, value in figures(result).items()},
    }
    return table(["figure", "value"], [[name, text] for name, text in rows.items()])


# -- the plot ----------------------------------------------------------------------------------------------------------

CAPTION = "Seconds of a step and of the construction beside their bounds; bytes in memory and on the drive"


def plot(result: Result, path: Path) -> None:
    """Seconds on the left, bytes on the right; grey: what the blue bars are compared with."""
    made = result["construction"]
    times = [
        Bar("step", seconds(result), f"{seconds(result):.1f}"),
        grey("its bytes ÷ the drive's mixed rate", spread(transfers(result)).median),
        grey("its compute, alone", result["compute"]),
        Bar("construction", made["seconds"], f"{made['seconds']:.1f}"),
        grey("its bytes ÷ the drive's write rate", made["written"] / result["write"]),
    ]
    sizes = [
        Bar("peak RSS", result["peak_rss"] / 1e9, f"{result['peak_rss'] / 1e9:.2f}"),
        grey("states on the drive", result["drive"] / 1e9),
        grey("bf16 parameters alone", 2 * result["parameters"] / 1e9),
    ]
    height = 0.36 * len(times) + 1.35
    figure = new_figure(12, height, title=title(result), subtitle="8-bit moments, checkpointed blocks", left=0.02)
    bottom, area = 0.35 / height, 1 - 1.35 / height
    draw_bars(figure.add_axes((0.22, bottom, 0.33, area)), times, room=1.2)
    draw_bars(figure.add_axes((0.71, bottom, 0.27, area)), sizes, room=1.25)
    figure.text(0.22, 1 - 0.9 / height, "seconds", fontsize=9, color=MUTED)
    figure.text(0.71, 1 - 0.9 / height, "GB", fontsize=9, color=MUTED)
    save(figure, path)


def grey(name: str, value: float) -> Bar:
    return Bar(name, value, f"{value:.1f}", PEER)


REPORT = Report(title, fragments, figures, plot, CAPTION)

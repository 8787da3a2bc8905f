"""LoRA on a Llama whose frozen base is on a drive, in bf16 and in 4 bits."""

from __future__ import annotations

from pathlib import Path

from harness import Result, spread
from report.page import Report, setup, table
from report.style import MUTED, PEER, Bar, draw_bars, new_figure, save

WARM_UP = 1
"""Steps that are not counted: the first records the trace."""
NAMES = {"bf16": "bf16 base", "nf4": "4-bit base (nf4)"}


def seconds(run: Result) -> float:
    """Median of the counted steps."""
    return spread(step["seconds"] for step in run["steps"][WARM_UP:]).median


def drive_seconds(run: Result) -> float:
    """Seconds of the bytes that a step reads, at the drive's rate: the mean of before and after the run."""
    return float(run["read"] / (sum(run["rates"]) / len(run["rates"])))


def figures(result: Result) -> dict[str, float]:
    return {
        "peak RSS, GB, bf16 base": result["bf16"]["peak_rss"] / 1e9,
        "peak RSS, GB, 4-bit base": result["nf4"]["peak_rss"] / 1e9,
        "bytes read in a step ÷ bytes of the base, bf16": result["bf16"]["read"] / result["bf16"]["frozen"],
        "bytes read in a step ÷ bytes of the base, 4-bit": result["nf4"]["read"] / result["nf4"]["frozen"],
        "bytes read, bf16 ÷ 4-bit": result["bf16"]["read"] / result["nf4"]["read"],
    }


def title(result: Result) -> str:
    args = result["args"]
    return f"LoRA on a Llama of {args['layers']} layers of width {args['hidden']}, whose base is on a drive"


def fragments(result: Result) -> dict[str, str]:
    args, small = result["args"], result["of_small"]
    recipe = [
        f"Adapters of rank {args['rank']} beside every linear layer of the blocks (peft), random weights, AdamW with "
        f"8-bit moments, checkpointed blocks, batch 1, sequence {args['sequence']}, all states on nvme, "
        f"{args['prefetch']} fetched ahead.",
        f"The control group of each run has {args['limit']} of memory."
        if result["nf4"]["group"]
        else "No control group bounds the processes.",
        f"The small models have {small['layers']} layers of width {small['hidden']}.",
    ]
    return {"setup": setup(result, *recipe), "table": rows_of(result), "losses": losses_of(result)}


def rows_of(result: Result) -> str:
    runs = [result[base] for base in NAMES]
    rows = {
        "bytes of the base, GB": [f"{run['frozen'] / 1e9:.2f}" for run in runs],
        "trained parameters, millions": [f"{run['trained'] / 1e6:.1f}" for run in runs],
        "peak RSS in training, GB": [f"{run['peak_rss'] / 1e9:.2f}" for run in runs],
        "peak RSS in construction, GB": [f"{run['construction']['peak_rss'] / 1e9:.2f}" for run in runs],
        "on the drive, GB": [f"{run['drive'] / 1e9:.2f}" for run in runs],
        "read in a step, GB": [f"{run['read'] / 1e9:.2f}" for run in runs],
        "written in a step, GB": [f"{run['written'] / 1e9:.2f}" for run in runs],
        "step, s": [f"{seconds(run):.1f}" for run in runs],
        "bytes read ÷ the drive's rate, s": [f"{drive_seconds(run):.1f}" for run in runs],
        "drive, read, before and after, GB/s": [
            ", ".join(f"{rate / 1e9:.2f}" for rate in run["rates"]) for run in runs
        ],
        "construction, s": [f"{run['construction']['seconds']:.0f}" for run in runs],
        "losses": [", ".join(f"{step['loss']:.4f}" for step in run["steps"]) for run in runs],
    }
    return table(["figure", *NAMES.values()], [[name, *values] for name, values in rows.items()])


def losses_of(result: Result) -> str:
    rows = [
        [NAMES[base], who, ", ".join(f"{loss:.6f}" for loss in result["small"][base][key])]
        for base in NAMES
        for key, who in (("engine", "Infinity, from the drive"), ("plain", "plain loop in memory"))
    ]
    return table(["base", "run", "losses of its steps"], rows)


CAPTION = "Seconds of a step and bytes of memory and drive, with a base in bf16 and in 4 bits"


def plot(result: Result, path: Path) -> None:
    """Seconds on the left, bytes on the right; grey: what the blue bars are compared with."""
    times, sizes = [], []
    for base, name in NAMES.items():
        run = result[base]
        times += [
            Bar(f"step, {name}", seconds(run), f"{seconds(run):.0f}"),
            Bar("its bytes ÷ the drive's rate", drive_seconds(run), f"{drive_seconds(run):.0f}", PEER),
        ]
        sizes += [
            Bar(f"peak RSS, {name}", run["peak_rss"] / 1e9, f"{run['peak_rss'] / 1e9:.2f}"),
            Bar("read in a step", run["read"] / 1e9, f"{run['read'] / 1e9:.1f}", PEER),
        ]
    height = 0.36 * len(times) + 1.35
    figure = new_figure(12, height, title=title(result), subtitle="checkpointed blocks, all states on nvme", left=0.02)
    bottom, area = 0.35 / height, 1 - 1.35 / height
    draw_bars(figure.add_axes((0.2, bottom, 0.3, area)), times, room=1.2)
    draw_bars(figure.add_axes((0.7, bottom, 0.27, area)), sizes, room=1.25)
    figure.text(0.2, 1 - 0.9 / height, "seconds", fontsize=9, color=MUTED)
    figure.text(0.7, 1 - 0.9 / height, "GB", fontsize=9, color=MUTED)
    save(figure, path)


REPORT = Report(title, fragments, figures, plot, CAPTION)

"""One training step with everything on NVMe beside the plain loop and the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Result, median, median_ratio, spread
from report.page import Report, setup, table
from report.style import MUTED, PEER, Bar, draw_bars, new_figure, save

ROWS = {
    "infinity_seconds": "step, s",
    "plain_seconds": "plain in-memory loop, s",
    "ratio_to_plain": "ratio to plain",
    "bound_seconds": "bound, s",
    "ratio_to_bound": "ratio to bound",
    "ratio_to_drive": "ratio to bytes ÷ disk",
    "disk_gb_per_second": "disk, reads and writes together, GB/s",
    "wait_seconds": "compute waited for I/O, s",
    "update_seconds": "in Adam, overlapping compute, s",
    "read_bytes_per_parameter": "read, bytes per parameter",
    "written_bytes_per_parameter": "written, bytes per parameter",
    "peak_rss_gb": "peak RSS, GB",
    "plain_peak_rss_gb": "peak RSS of plain, GB",
}

RATIOS = {"plain": "ratio_to_plain", "bound": "ratio_to_bound", "bytes ÷ disk": "ratio_to_drive"}
USUAL = 128
"""Tokens of a sequence with which the model computes for longer than the drive takes."""


def over_steps(runs: list[dict[str, Any]], key: str) -> float:
    """Median over the counted steps of all processes of a kind."""
    return median([step for run in runs for step in run["steps"]], key)


def disk_rate(result: Result, run: dict[str, Any]) -> float:
    """Bytes a second, read and written in sum, around a run; in results of before, of all rounds together."""
    rates = run.get("rates") or [rate for disk in result["runs"]["disk"] for rate in disk["rates"]]
    return spread(rates).median


def parameters(result: Result) -> int:
    return next(int(runs[0]["parameters"]) for runs in result["runs"].values() if "parameters" in runs[0])


def columns(result: Result) -> dict[str, dict[str, float]]:
    """The figures of ROWS by the title of the kind."""
    found = {}
    for kind, ours in result["runs"].items():
        moments, _, clip = kind.partition(", clip ")
        if moments not in ("plain", "disk"):
            title = f"{moments} moments" + (f", clipping {clip}" if clip != "0" else "")
            found[title] = column(result, ours, clip)
    return found


def column(result: Result, ours: list[dict[str, Any]], clip: str) -> dict[str, float]:
    plain = result["runs"][f"plain, clip {clip}"]
    read, written = ours[0]["read"], ours[0]["written"]
    drives = [(read + written) / disk_rate(result, run) for run in ours]
    # With clipping no unit is updated before the last gradient is there: backward hides nothing of the update.
    hidden = over_steps(plain, "backward") if clip != "0" else 0.0
    each = [over_steps([run], "seconds") for run in ours]
    seconds, base = over_steps(ours, "seconds"), over_steps(plain, "seconds")
    return {
        "infinity_seconds": seconds,
        "plain_seconds": base,
        "ratio_to_plain": median_ratio(each, (over_steps([run], "seconds") for run in plain)),
        "bound_seconds": spread(drives).median + hidden,
        "ratio_to_bound": spread(own / (drive + hidden) for own, drive in zip(each, drives, strict=True)).median,
        "ratio_to_drive": spread(own / drive for own, drive in zip(each, drives, strict=True)).median,
        "disk_gb_per_second": spread(disk_rate(result, run) for run in ours).median / 1e9,
        "wait_seconds": over_steps(ours, "wait"),
        "update_seconds": over_steps(ours, "update"),
        "read_bytes_per_parameter": read / parameters(result),
        "written_bytes_per_parameter": written / parameters(result),
        "peak_rss_gb": max(run["peak_rss"] for run in ours) / 1e9,
        "plain_peak_rss_gb": max(run["peak_rss"] for run in plain) / 1e9,
    }


def title(result: Result) -> str:
    where = "parameters and optimizer states on NVMe"
    if budget := budget_of(result):
        where += f" beyond {budget} of host memory"
    return f"One step of {parameters(result) / 1e6:.0f} M parameters, {where}"


def budget_of(result: Result) -> str:
    """`infinity.memory.host` of the runs; empty without one."""
    return result.get("args", {}).get("host_memory") or ""


def fragments(result: Result) -> dict[str, str]:
    return ({"setup": setup(result, *recipe(result["args"]))} if "args" in result else {}) | {
        "table": figures_table(result)
    }


def recipe(args: dict[str, Any]) -> list[str]:
    share = args.get("forward_updates")
    split = (
        f"Without clipping, the next forward does {share:g} of the updates (infinity.forward_updates)." if share else ""
    )
    return [
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, {args['heads']} heads, vocabulary {args['vocab']}, "
        f"sequence {args['sequence']}, batch {args['batch']}, bf16, AdamW, untied head.",
        f"Medians of {args['rounds']} processes of {args['steps']} steps each, kinds interleaved.",
        *filter(None, [split]),
    ]


def figures_table(result: Result) -> str:
    found = columns(result)
    rows = [[text, *(f"{one[key]:.2f}" for one in found.values())] for key, text in ROWS.items()]
    around = all("rates" in run for kind, runs in result["runs"].items() if "plain" not in kind for run in runs)
    measured = "before and after the steps of each process" if around else "once a round"
    legend = (
        f"Bound: the bytes of a step ÷ the disk's rate, measured {measured}; with clipping, plus the plain loop's "
        "backward.\n"
        "Times are medians of all steps. Ratios are medians over processes; those to plain are taken within a round."
    )
    return f"{legend}\n\n{table(['', *found], rows)}"


def figures(result: Result) -> dict[str, float]:
    args, found = result.get("args", {}), {}
    prefix = f"host memory {budget}, " if (budget := budget_of(result)) else ""
    if args.get("sequence", USUAL) < USUAL:
        prefix += f"batch {args['batch']}, sequence {args['sequence']}, "
    for name, one in columns(result).items():
        for title, key in RATIOS.items():
            found[f"{prefix}{name} ÷ {title}"] = one[key]
    return found


# -- the plot ----------------------------------------------------------------------------------------------------------

CAPTION = "Seconds and peak memory of a step, beside the plain loop in memory and the disk"


def plot(result: Result, path: Path) -> None:
    """Step times on the left, peak memory on the right; plain loops first, then the formats of moments."""
    found = columns(result)
    times, peaks = [], []
    for clipping in (False, True):
        chosen = {name: one for name, one in found.items() if ("clipping" in name) == clipping}
        plain = next(iter(chosen.values()))
        name = "plain loop in memory" + (", clipping 1" if clipping else "")
        times.append(Bar(name, plain["plain_seconds"], f"{plain['plain_seconds']:.2f}", PEER))
        peaks.append(Bar(name, plain["plain_peak_rss_gb"], f"{plain['plain_peak_rss_gb']:.2f}", PEER))
        for name, one in chosen.items():
            label = f"{one['infinity_seconds']:.2f}, {one['ratio_to_plain']:.2f} × plain"
            times.append(Bar(f"Infinity, {name}", one["infinity_seconds"], label, bound=one["bound_seconds"]))
            peaks.append(Bar(name, one["peak_rss_gb"], f"{one['peak_rss_gb']:.2f}"))
    height = 0.36 * len(times) + 1.6
    figure = new_figure(12, height, title=title(result), subtitle=shape(result), left=0.02)
    bottom, top = 0.35 / height, 1.2 / height
    draw_bars(figure.add_axes((0.24, bottom, 0.41, 1 - bottom - top)), times)
    draw_bars(figure.add_axes((0.69, bottom, 0.29, 1 - bottom - top)), peaks, names=False, room=1.2)
    bound = "the bytes of a step ÷ the disk's rate; with clipping, plus the plain loop's backward"
    figure.text(0.02, 1 - 0.84 / height, f"Black lines: {bound}.", fontsize=9, color=MUTED)
    figure.text(0.24, 1 - 1.12 / height, "seconds a step, median", fontsize=9, color=MUTED)
    figure.text(0.69, 1 - 1.12 / height, "peak RSS, GB", fontsize=9, color=MUTED)
    save(figure, path)


def shape(result: Result) -> str:
    args = result["args"]
    sizes = f"batch {args['batch']}, sequence {args['sequence']}"
    return f"GPT-2: {sizes}, bf16, AdamW; {args['rounds']} processes of each kind."


REPORT = Report(title, fragments, figures, plot, CAPTION)

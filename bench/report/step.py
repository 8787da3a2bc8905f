"""One training step with everything on NVMe beside the plain loop and the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Result, median, spread
from report.page import RATIOS, Report, ratio, setup, table
from report.style import MUTED, PEER, Bar, draw_bars, new_figure, save

ROWS = {
    "infinity_seconds": "step, s",
    "plain_seconds": "plain in-memory loop, s",
    "plain": "ratio to plain",
    "bound_seconds": "bound, s",
    "bound": "ratio to bound",
    "drive_seconds": "bytes ÷ disk, s",
    "bytes ÷ disk": "ratio to bytes ÷ disk",
    "disk_gb_per_second": "disk, reads and writes together, GB/s",
    "wait_seconds": "compute waited for I/O, s",
    "update_seconds": "in Adam, overlapping compute, s",
    "read_bytes_per_parameter": "read, bytes per parameter",
    "written_bytes_per_parameter": "written, bytes per parameter",
    "peak_rss_gb": "peak RSS, GB",
    "plain_peak_rss_gb": "peak RSS of plain, GB",
}

TO = {"plain": "plain_seconds", "bound": "bound_seconds", "bytes ÷ disk": "drive_seconds"}
"""Row of a ratio → the figure that it is a ratio to."""
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


def kinds(result: Result) -> dict[str, str]:
    """Titles of what the engine ran → kinds of runs."""
    found = {}
    for kind in result["runs"]:
        moments, _, clip = kind.partition(", clip ")
        if moments not in ("plain", "disk"):
            found[f"{moments} moments" + (f", clipping {clip}" if clip != "0" else "")] = kind
    return found


def columns(result: Result) -> dict[str, dict[str, float]]:
    """The figures of ROWS, without its ratios, by the title of the kind."""
    return {
        title: column(result, result["runs"][kind], kind.partition(", clip ")[2])
        for title, kind in kinds(result).items()
    }


def column(result: Result, ours: list[dict[str, Any]], clip: str) -> dict[str, float]:
    plain = result["runs"][f"plain, clip {clip}"]
    read, written = ours[0]["read"], ours[0]["written"]
    drives, hidden = drive_times(result, ours), not_hidden(plain, clip)
    return {
        "infinity_seconds": over_steps(ours, "seconds"),
        "plain_seconds": over_steps(plain, "seconds"),
        "bound_seconds": spread(drives).median + hidden,
        "drive_seconds": spread(drives).median,
        "disk_gb_per_second": spread(disk_rate(result, run) for run in ours).median / 1e9,
        "wait_seconds": over_steps(ours, "wait"),
        "update_seconds": over_steps(ours, "update"),
        "read_bytes_per_parameter": read / parameters(result),
        "written_bytes_per_parameter": written / parameters(result),
        "peak_rss_gb": max(run["peak_rss"] for run in ours) / 1e9,
        "plain_peak_rss_gb": max(run["peak_rss"] for run in plain) / 1e9,
    }


def drive_times(result: Result, ours: list[dict[str, Any]]) -> list[float]:
    """Return the bytes of a step over the drive's rate of each round."""
    return [(ours[0]["read"] + ours[0]["written"]) / disk_rate(result, run) for run in ours]


def not_hidden(plain: list[dict[str, Any]], clip: str) -> float:
    """Seconds of backward, if it hides nothing of the update: no unit is updated before the last gradient arrives."""
    return over_steps(plain, "backward") if clip != "0" else 0.0


def within_rounds(result: Result, kind: str) -> dict[str, list[float]]:
    """Return the ratios of each round, by the rows in `TO`."""
    ours, clip = result["runs"][kind], kind.partition(", clip ")[2]
    plain = result["runs"][f"plain, clip {clip}"]
    drives, hidden = drive_times(result, ours), not_hidden(plain, clip)
    others = [[over_steps([run], "seconds") for run in plain], [drive + hidden for drive in drives], drives]
    each = [over_steps([run], "seconds") for run in ours]
    return {
        name: [own / one for own, one in zip(each, other, strict=True)] for name, other in zip(TO, others, strict=True)
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
    rounds = [within_rounds(result, kind) for kind in kinds(result).values()]
    rows = [
        [text, *(cell(key, one, each) for one, each in zip(found.values(), rounds, strict=True))]
        for key, text in ROWS.items()
    ]
    around = all("rates" in run for kind, runs in result["runs"].items() if "plain" not in kind for run in runs)
    measured = "before and after the steps of each process" if around else "once a round"
    legend = (
        f"Bound: the bytes of a step ÷ the disk's rate, measured {measured}; with clipping, plus the plain loop's "
        "backward.\n"
        f"Times are medians of all steps.\n{RATIOS}"
    )
    return f"{legend}\n\n{table(['', *found], rows)}"


def cell(key: str, one: dict[str, float], rounds: dict[str, list[float]]) -> str:
    if key in TO:
        return ratio(number(one["infinity_seconds"]), number(one[TO[key]]), rounds[key])
    return number(one[key])


def number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def figures(result: Result) -> dict[str, float]:
    args, found = result.get("args", {}), {}
    prefix = f"host memory {budget}, " if (budget := budget_of(result)) else ""
    if args.get("sequence", USUAL) < USUAL:
        prefix += f"batch {args['batch']}, sequence {args['sequence']}, "
    for name, kind in kinds(result).items():
        for title, ratios in within_rounds(result, kind).items():
            found[f"{prefix}{name} ÷ {title}"] = spread(ratios).median
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
            label = f"{one['infinity_seconds']:.2f}, {one['infinity_seconds'] / one['plain_seconds']:.2f} × plain"
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

"""One training step with everything on NVMe beside the plain loop and the disk."""

from __future__ import annotations

from typing import Any

from harness import Result, median, spread
from report.page import Report, setup, table

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
        "ratio_to_plain": seconds / base,
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
        "backward.\nTimes are medians of steps, and ratios to the disk medians of processes."
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


REPORT = Report(title, fragments, figures)

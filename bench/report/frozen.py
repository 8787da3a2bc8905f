"""A step of adapters on a frozen base in each format of `infinity.frozen`, and the speed of its kernels."""

from __future__ import annotations

import statistics

from harness import Result
from report.page import RATIOS, Report, ratio, setup, table

FIRST = "as_is"
LEGEND = f"Medians of all steps. {RATIOS}"
RATES = """\
GB/s of decoded bytes, the fastest of 60 passes over 16 MiB in bf16, medians of the processes."""


def ratios(result: Result, format: str) -> list[float]:
    """Return the ratio of each round's median step to that of the base as it is."""
    pairs = zip(result["runs"][format], result["runs"][FIRST], strict=True)
    return [statistics.median(one["seconds"]) / statistics.median(other["seconds"]) for one, other in pairs]


def fragments(result: Result) -> dict[str, str]:
    args, rows, speeds = result["args"], [], []
    for format, runs in result["runs"].items():
        seconds, first = (
            f"{statistics.median(s for run in each for s in run['seconds']):.2f}"
            for each in (runs, result["runs"][FIRST])
        )
        rows.append(
            [
                f"`{format}`",
                seconds,
                f"{min(s for run in runs for s in run['seconds']):.2f}",
                ratio(seconds, first, ratios(result, format)),
                f"{runs[0]['read'] / 1e6:,.0f}",
                f"{runs[0]['read'] / runs[0]['frozen'] * 4:.2f}",
            ]
        )
        if runs[0]["rates"]:
            names = ("decode", "encode", "copy")
            median = {name: statistics.median(run["rates"][name] for run in runs) for name in names}
            speeds.append([f"`{format}`", *(f"{median[name]:.1f}" for name in names)])
    as_is = result["runs"][FIRST][0]
    recipe = (
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW; {as_is['frozen'] / 1e6:.0f} M frozen parameters and "
        f"{as_is['trained'] / 1e6:.1f} M in adapters, every state on NVMe."
    )
    sizes = f"{args['rounds']} processes of {args['steps']} steps for each row."
    head = ["`infinity.frozen`", "step, s", "fastest, s", f"÷ `{FIRST}`", "MB read a step", "bits read per pass"]
    return {
        "setup": setup(result, recipe, sizes),
        "table": f"{LEGEND}\nBits are those of a frozen parameter, of two passes a step.\n\n{table(head, rows)}",
        "rates": f"{RATES}\n\n{table(['`infinity.frozen`', 'decode in place', 'encode', 'copy'], speeds)}",
    }


def figures(result: Result) -> dict[str, float]:
    read = {format: runs[0]["read"] for format, runs in result["runs"].items()}
    return {
        f"{format} ÷ {FIRST}, {name}": value
        for format in result["runs"]
        if format != FIRST
        for name, value in (("read", read[format] / read[FIRST]), ("step", statistics.median(ratios(result, format))))
    }


REPORT = Report(lambda result: "A frozen base in 8 and 4 bits on NVMe", fragments, figures)

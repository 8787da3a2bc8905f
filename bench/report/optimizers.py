"""A step by several optimizers on NVMe, beside the same optimizer in a plain loop."""

from __future__ import annotations

import statistics

from harness import Result
from report.page import RATIOS, Report, ratio, setup, table

LEGEND = f"""\
Medians of all steps. {RATIOS}
Bytes are those of a step for each parameter.
A plain loop holds parameters, gradients and states in memory; torch's AdamW is that of both rows of AdamW."""
_PLAIN = ": plain loop"


def loop_of(result: Result, kind: str) -> str:
    """Return the name of the plain loop with the optimizer of `kind`."""
    own = kind + _PLAIN
    return own if own in result["runs"] else "AdamW, torch's step" + _PLAIN


def ratios(result: Result, kind: str) -> list[float]:
    """Return each round's ratio of the time of a step of `kind` to that of its plain loop."""
    pairs = zip(result["runs"][kind], result["runs"][loop_of(result, kind)], strict=True)
    return [statistics.median(one["seconds"]) / statistics.median(other["seconds"]) for one, other in pairs]


def engines(result: Result) -> list[str]:
    return [kind for kind in result["runs"] if not kind.endswith(_PLAIN)]


def fragments(result: Result) -> dict[str, str]:
    args, rows = result["args"], []
    for kind in engines(result):
        runs, loops = result["runs"][kind], result["runs"][loop_of(result, kind)]
        seconds, plain = (
            f"{statistics.median(s for run in each for s in run['seconds']):.2f}" for each in (runs, loops)
        )
        read, written = (runs[0][name] / runs[0]["parameters"] for name in ("read", "written"))
        peaks = [max(run["peak_rss"] for run in each) / 1e9 for each in (runs, loops)]
        rows.append(
            [
                kind,
                seconds,
                plain,
                ratio(seconds, plain, ratios(result, kind)),
                f"{read:.1f} + {written:.1f}",
                f"{peaks[0]:.2f}",
                f"{peaks[1]:.2f}",
            ]
        )
    recipe = (
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, fp32; every state on NVMe."
    )
    sizes = f"{args['rounds']} processes of {args['steps']} steps for each row."
    head = ["optimizer", "s", "plain loop, s", "÷ plain loop", "read + written", "peak RSS, GB", "plain loop's"]
    return {"setup": setup(result, recipe, sizes), "table": f"{LEGEND}\n\n{table(head, rows)}"}


def figures(result: Result) -> dict[str, float]:
    return {f"{kind} ÷ its plain loop": statistics.median(ratios(result, kind)) for kind in engines(result)}


def parameters(result: Result) -> int:
    return int(result["runs"][engines(result)[0]][0]["parameters"])


REPORT = Report(
    lambda result: f"Optimizers of a model of {parameters(result) / 1e6:.0f} M parameters on NVMe", fragments, figures
)

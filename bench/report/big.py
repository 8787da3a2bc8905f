"""A Llama larger than memory, trained from a drive."""

from __future__ import annotations

from harness import Result, spread
from report.page import Report, setup, table


def moved(result: Result) -> float:
    """Seconds of a step's bytes at the drive's mixed bandwidth."""
    return float((result["read"] + result["written"]) / result["rates"]["mixed"])


def seconds(result: Result) -> float:
    """Median of the counted steps."""
    return spread(step["seconds"] for step in result["steps"][3:]).median


def figures(result: Result) -> dict[str, float]:
    parameters, made = result["parameters"], result["construction"]
    bound = max(result["compute"], moved(result))
    return {
        "step ÷ bound": seconds(result) / bound,
        "construction ÷ written at the drive's speed": made["seconds"] / (made["written"] / result["rates"]["write"]),
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
        "bytes of a step ÷ drive, mixed, s": f"{moved(result):.1f}",
        "drive, mixed, GB/s": f"{result['rates']['mixed'] / 1e9:.2f}",
        "drive, write, GB/s": f"{result['rates']['write'] / 1e9:.2f}",
        "construction, s": f"{made['seconds']:.1f}",
        "written by the construction, GB": f"{made['written'] / 1e9:.1f}",
        "loss, first and last": f"{losses[0]:.3f}, {losses[-1]:.3f}",
        **{name: f"{value:.2f}" for name, value in figures(result).items()},
    }
    return table(["figure", "value"], [[name, text] for name, text in rows.items()])


REPORT = Report(title, fragments, figures)

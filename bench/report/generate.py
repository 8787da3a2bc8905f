"""Generating text with parameters on NVMe, in host memory, and plainly."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Result, median, spread
from report.page import Report, setup, table


def disk_rate(result: Result) -> float:
    """GB/s read."""
    return spread(rate for run in result["runs"]["disk"] for rate in run["rates"]).median


def parameters(result: Result) -> int:
    return int(result["runs"]["plain"][0]["parameters"])


def column(kind: str, runs: list[dict[str, Any]], disk: float) -> dict[str, float]:
    """Figures of one kind, by name. disk: GB/s."""
    found = {
        "tokens a second": 1 / statistics.median(seconds for run in runs for seconds in run["tokens"]),
        "processor time a token, s": statistics.median(seconds for run in runs for seconds in run["processor"]),
        "prompt, s": median(runs, "prompt"),
        "peak RSS, GB": max(run["peak_rss"] for run in runs) / 1e9,
    }
    if kind != "plain":
        found["units fetched a token"] = runs[0]["fetches"]
        found["units of the model"] = runs[0]["units"]
        found["waited for units a token, s"] = median(runs, "wait")
        found["buffers of units, GB"] = runs[0]["tier_bytes"]["device"] / 1e9
    if kind.startswith("nvme"):
        read = runs[0]["read"]
        found["read a token, GB"] = read / 1e9
        found["bound by the disk, tokens a second"] = disk * 1e9 / read if read else 0.0
    return found


def title(result: Result) -> str:
    kind = " of experts" if result.get("args", {}).get("experts") else ""
    return f"Generating text with {parameters(result) / 1e6:.0f} M parameters{kind}"


def recipe(result: Result) -> list[str]:
    args = result["args"]
    shape = f"hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}"
    model = "Llama"
    if args.get("experts"):
        model, shape = (
            "Qwen3-MoE",
            f"{shape}, {args['experts']} experts a layer, of which a token uses {args['chosen']}",
        )
    return [
        f"{model} of transformers {result['transformers']}: {shape}, bf16: {2 * parameters(result) / 1e9:.3f} GB.",
        f"Greedy generation of {args['tokens']} tokens after a prompt of {args['prompt']}: one sequence, with a KV "
        "cache.",
        f"Medians of {args['rounds']} processes of each kind, interleaved; all generated the same tokens.",
    ]


def fragments(result: Result) -> dict[str, str]:
    disk = disk_rate(result)
    columns = {kind: column(kind, runs, disk) for kind, runs in result["runs"].items() if kind != "disk"}
    names = dict.fromkeys(name for one in columns.values() for name in one)
    rows = [[name, *(f"{one[name]:.3g}" if name in one else "" for one in columns.values())] for name in names]
    text = f"Disk: {disk:.2f} GB/s read.\n\n{table(['', *columns], rows)}"
    return ({"setup": setup(result, *recipe(result))} if "args" in result else {}) | {"table": text}


REPORT = Report(title, fragments)

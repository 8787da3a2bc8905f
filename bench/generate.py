"""Tokens a second, bytes read and memory of generating text with parameters on NVMe, in host memory, and plainly.

    python bench/generate.py                       # a Llama of 325 M parameters in bf16; about 5 minutes on 2 cores
    python bench/generate.py --layers 4 --rounds 1

Greedy decoding with a KV cache by transformers, one sequence. Every measurement runs in a process of its own, since
peak memory belongs to a process, and the kinds take turns, round by round, since machines are shared: compare medians
and ratios. `plain` is the model in memory. `bound` is the time the bytes of a token take at the disk's bandwidth,
measured in the same rounds. Every kind must give the same tokens. Writes bench/results/generate.json and generate.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KINDS = ("plain", "cpu", "nvme", "nvme, half cached", "disk")
"""What is measured: the model in memory, parameters in host memory and on NVMe, half of them cached; the disk."""
WARM_UP = 4
"""Tokens that are not counted: the first is the prompt's, and the trace is learned from it."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=64, help="tokens that are read")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are written and counted")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the parameters")
    parser.add_argument("--name", default="generate", help="name of the result files")
    parser.add_argument("--only", choices=("save", *KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def shape(args: argparse.Namespace) -> Any:
    import torch
    import transformers

    return transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.prompt + args.tokens + WARM_UP,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )


def run_save(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(shape(args)).to(torch.bfloat16).save_pretrained(args.model)
    return {}


def load(args: argparse.Namespace, kind: str) -> tuple[Any, Any]:
    """The model with its values, and its engine; None for `plain`."""
    import torch
    import transformers

    import infinity

    if kind == "plain":
        return transformers.LlamaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval(), None
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shape(args))
    infinity.load_pretrained(model, args.model)
    where, _, cached = kind.partition(", ")
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": where, "nvme_path": args.nvme_path}},
        "infinity": {"cache_bytes": model.num_parameters() if cached else 0},  # of 2 bytes a parameter
    }
    return model, infinity.init_inference(model, config, dtype=torch.bfloat16)


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import torch

    model, engine = load(args, kind)
    ids = torch.randint(3, args.vocab, (1, args.prompt), generator=torch.Generator().manual_seed(1))
    times: list[float] = []
    seen: list[Any] = []

    def tick(*_: Any) -> None:
        times.append(time.perf_counter())
        if engine is not None:
            seen.append(engine.ledger.snapshot())

    model.register_forward_pre_hook(tick)
    count = args.tokens + WARM_UP
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    tick()
    seconds = [after - before for before, after in pairwise(times)]
    result = {
        "parameters": model.num_parameters(),
        "said": said[0].tolist(),
        "prompt": seconds[0],
        "tokens": seconds[WARM_UP:],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if engine is not None:
        moved = seen[-1] - seen[WARM_UP]
        result |= {
            "units": len(engine.units),
            "read": moved.nvme_bytes_read / args.tokens,
            "fetches": moved.fetches / args.tokens,
            "wait": moved.wait_seconds / args.tokens,
            "tier_bytes": engine.ledger.tier_bytes(),
        }
        engine.close()
    return result


def run_disk(args: argparse.Namespace) -> dict[str, Any]:
    from infinity.cli.drive.measure import Bench, Workload

    read = Workload("read")
    with Bench([args.nvme_path], 2 << 30, [read]) as bench:
        return {"rates": [bench.run(read, nbytes=2 << 30).gb_per_s for _ in range(3)]}


# -- the rounds and the table ------------------------------------------------------------------------------------------


def child(kind: str, model: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", kind, "--model", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    said = {tuple(run["said"]) for kind in KINDS[:-1] for run in runs[kind]}
    if len(said) != 1:
        raise SystemExit("the kinds wrote different tokens")
    disk = statistics.median(rate for run in runs["disk"] for rate in run["rates"])
    summary: dict[str, Any] = {"parameters": runs["plain"][0]["parameters"], "disk_gb_per_s": disk, "rows": {}}
    for kind in KINDS[:-1]:
        ours = runs[kind]
        row = {
            "tokens a second": 1 / statistics.median(seconds for run in ours for seconds in run["tokens"]),
            "prompt, s": statistics.median(run["prompt"] for run in ours),
            "peak RSS, GB": max(run["peak_rss"] for run in ours) / 1e9,
        }
        if kind != "plain":
            row["units fetched a token"] = ours[0]["fetches"]
            row["of units"] = ours[0]["units"]
            row["waited for units a token, s"] = statistics.median(run["wait"] for run in ours)
            row["buffers of units, GB"] = ours[0]["tier_bytes"]["device"] / 1e9
        if kind.startswith("nvme"):
            row["read a token, GB"] = ours[0]["read"] / 1e9
            row["bound by the disk, tokens a second"] = disk * 1e9 / ours[0]["read"] if ours[0]["read"] else 0.0
        summary["rows"][kind] = row
    return summary


def table(args: argparse.Namespace, summary: dict[str, Any]) -> str:
    rows = summary["rows"]
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cores = len(os.sched_getaffinity(0))
    parameters = summary["parameters"]
    lines = [
        f"# Generating text with {parameters / 1e6:.0f} M parameters",
        "",
        f"`python bench/generate.py {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
        f"{platform.processor() or platform.machine()}, {cores} cores, torch {version('torch')}; Llama of transformers "
        f"{version('transformers')}, hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocab}, bf16: "
        f"{2 * parameters / 1e9:.3f} GB; a prompt of {args.prompt} tokens and {args.tokens} written, greedily, one "
        f"sequence, KV cache. Medians of {args.rounds} processes of each kind, in turns; all wrote the same tokens. "
        f"Disk: {summary['disk_gb_per_s']:.2f} GB/s read.",
        "",
        "| | " + " | ".join(rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for name in names:
        cells = [f"{row[name]:.3g}" if name in row else "" for row in rows.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    if args.only:
        known = {"save": run_save, "disk": run_disk}
        print(json.dumps(known[args.only](args) if args.only in known else run(args, args.only)))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as model:
        child("save", model)
        for number in range(args.rounds):
            for kind in KINDS:
                runs[kind].append(child(kind, model))
                latest = runs[kind][-1]
                shown = (
                    f"{1 / statistics.median(latest['tokens']):.2f} tokens a second"
                    if "tokens" in latest
                    else f"{max(latest['rates']):.2f} GB/s"
                )
                print(f"round {number + 1}/{args.rounds}  {kind:18}  {shown}", flush=True)
    summary = summarize(runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")
    text = table(args, summary)
    (RESULTS / f"{args.name}.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()

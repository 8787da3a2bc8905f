"""What a checkpoint costs a training with everything on NVMe: in the foreground, in the background, and none.

    python bench/save.py                       # 99 M parameters; about 5 minutes on 2 cores

Every measurement runs in a process of its own, since peak memory belongs to a process, and the kinds take turns, round
by round, since machines are shared: compare medians. Each trains `--steps` steps from the moment a checkpoint is asked
for, and then waits for it; `none` trains as many. `stopped` is how long save_checkpoint kept the loop, `whole` when the
checkpoint was whole, `together` the steps and the checkpoint. Writes bench/results/save.json and bench/results/save.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SAVES = ("none", "foreground", "background")
CLIPS = (0.0, 1.0)
KINDS = [f"{save}, clip {clip:g}" for clip in CLIPS for save in SAVES]
"""Without clipping units are updated during backward, with it in the next forward."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, after 2 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="folder for the checkpoints")
    parser.add_argument("--name", default="save", help="name of the result files")
    parser.add_argument("--before", default="", help="command that each measured process is started with")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, save: str, clip: float) -> dict[str, Any]:
    import torch

    import infinity
    from infinity.gpt2.model import GPT2, GPT2Config

    with torch.device("meta"):
        model = GPT2(
            GPT2Config(
                vocab_size=args.vocab,
                seq_length=args.sequence,
                num_layers=args.layers,
                hidden_size=args.hidden,
                num_attention_heads=args.heads,
                tie_word_embeddings=False,
            )
        )
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    generator = torch.Generator().manual_seed(1)
    engine, *_ = infinity.initialize(model=model, config=config)

    def step() -> float:
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator)
        began = time.perf_counter()
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        return time.perf_counter() - began

    for _ in range(2):
        step()
    engine.settle()
    before = peak()
    stopped = whole = 0.0
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        began = time.perf_counter()
        if save != "none":
            engine.save_checkpoint(directory, background=save == "background")
            stopped = whole = time.perf_counter() - began
        steps = []
        for _ in range(args.steps):
            steps.append(step())
            if engine.saving is not None and whole == stopped and engine.saving.done():
                whole = time.perf_counter() - began
        engine.settle()
        if engine.saving is not None:
            engine.saving.wait()
            whole = whole if whole > stopped else time.perf_counter() - began
        together = time.perf_counter() - began
        nbytes = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    engine.close()
    parameters = sum(p.numel() for p in model.parameters())
    found = {"stopped": stopped, "whole": whole, "together": together, "steps": steps, "checkpoint_bytes": nbytes}
    return {**found, "peak_rss": peak(), "peak_rss_before": before, "parameters": parameters}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    command = [*shlex.split(args.before), sys.executable, __file__, *sys.argv[1:], "--only", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def summarize(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        save, _, clip = kind.partition(", clip ")
        found = runs[kind]
        middle = {key: statistics.median(run[key] for run in found) for key in ("stopped", "whole", "together")}
        number = len(found[0]["steps"])
        steps = [statistics.median(run["steps"][n] for run in found) for n in range(number)]
        base = statistics.median(run["together"] for run in runs[f"none, clip {clip}"])
        rows.append(
            {
                "save": save,
                "gradient_clipping": float(clip),
                **middle,
                "cost": middle["together"] - base,
                "steps": steps,
                "peak_rss": max(run["peak_rss"] for run in found),
                "peak_rss_before": max(run["peak_rss_before"] for run in found),
            }
        )
    return rows


def table(args: argparse.Namespace, rows: list[dict[str, Any]], run: dict[str, Any]) -> str:
    import os
    from importlib.metadata import version

    cores = len(os.sched_getaffinity(0))
    given = " ".join(shlex.quote(word) for word in sys.argv[1:] if not word.startswith("--before"))
    lines = [
        f"# A checkpoint of {run['parameters'] / 1e6:.0f} M parameters, parameters and optimizer states on NVMe",
        "",
        f"`{f'python bench/save.py {given}'.strip()}`",
        "",
        f"{platform.processor() or platform.machine()}, {cores} cores, torch {version('torch')}; hidden {args.hidden}, "
        f"{args.layers} layers, vocabulary {args.vocab}, sequence {args.sequence}, batch {args.batch}, bf16, AdamW. "
        f"The checkpoint has {run['checkpoint_bytes'] / 1e9:.2f} GB, on the disk that the states are on. Medians of "
        f"{args.rounds} processes, the kinds taking turns; each trains {args.steps} steps from the moment that the "
        "checkpoint is asked for, and waits for it at the end.",
        "",
        "| | no clipping, none | foreground | background | clipping 1, none | foreground | background |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {
        "stopped": "save_checkpoint returns after, s",
        "whole": "checkpoint is whole after, s",
        "together": f"{args.steps} steps and the checkpoint, s",
        "cost": "of that, the checkpoint's cost, s",
    }
    lines += [f"| {name} | " + " | ".join(f"{row[key]:.2f}" for row in rows) + " |" for key, name in names.items()]
    for number in range(args.steps):
        lines.append(f"| step {number + 1}, s | " + " | ".join(f"{row['steps'][number]:.2f}" for row in rows) + " |")
    lines.append("| peak RSS, GB | " + " | ".join(f"{row['peak_rss'] / 1e9:.2f}" for row in rows) + " |")
    lines.append("| before the save, GB | " + " | ".join(f"{row['peak_rss_before'] / 1e9:.2f}" for row in rows) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    if args.only:
        save, _, clip = args.only.partition(", clip ")
        print(json.dumps(run(args, save, float(clip))))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind in KINDS:
            runs[kind].append(child(args, kind))
            latest = runs[kind][-1]
            print(f"round {number + 1}/{args.rounds}  {kind:20}  {latest['together']:.2f} s in all", flush=True)
    rows = summarize(runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps({"summary": rows, "runs": runs}, indent=1) + "\n")
    text = table(args, rows, runs[KINDS[-1]][0])
    (RESULTS / f"{args.name}.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()

"""Time and memory of one training step with everything on NVMe, beside a plain in-memory PyTorch loop of the same
model.

    python bench/step.py                       # shape S: 319 M parameters; about 15 minutes on 2 cores
    python bench/step.py --layers 4 --rounds 1 --steps 3

Every measurement runs in a process of its own, since peak memory belongs to a process, and the kinds take turns, round
by round, since machines are shared: compare medians and ratios. `plain` keeps a bf16 model and an fp32 master in
memory and updates with torch's fused AdamW. `bound` is the bytes a step moved over the disk's mixed bandwidth,
measured in the same rounds with the update's own pattern (10 MB reads and writes, both in flight); with clipping, plus
the backward compute, which has nothing to hide the update behind. Writes bench/results/step.json and
bench/results/step.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MOMENTS = ("fp32", "bf16", "8bit")
CLIPS = (0.0, 1.0)
KINDS = [f"{what}, clip {clip:g}" for clip in CLIPS for what in ("plain", *MOMENTS)] + ["disk"]
"""What is measured: the plain loop and Infinity with moments of each format, without and with clipping; the disk."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process, after 2 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--name", default="step", help="name of the result files")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def model_and_batches(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    import torch

    from infinity.gpt2.model import GPT2, GPT2Config

    config = GPT2Config(
        vocab_size=args.vocab,
        seq_length=args.sequence,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = GPT2(config)
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return model, batch


def report(steps: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"steps": steps[2:], "peak_rss": peak, **more}


def run_plain(args: argparse.Namespace, clip: float) -> dict[str, Any]:
    import torch

    model, batch = model_and_batches(args, "cpu")
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)
    steps = []
    for _ in range(args.steps + 2):
        began = time.perf_counter()
        loss = model(*batch())
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
                master.grad = None
        seconds = time.perf_counter() - began
        steps.append({"seconds": seconds, "forward": forward - began, "backward": backward - forward})
    return report(steps)


def run_infinity(args: argparse.Namespace, clip: float, moments: str) -> dict[str, Any]:
    import infinity

    model, batch = model_and_batches(args, "meta")
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"moments": moments},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    steps: list[dict[str, float]] = []
    before = first = engine.ledger.snapshot()
    for number in range(args.steps + 2):
        if number == 2:  # bytes are counted from here, with nothing in flight
            engine.settle()
            before = first = engine.ledger.snapshot()
        began = time.perf_counter()
        loss = engine(*batch())
        forward = time.perf_counter()
        engine.backward(loss)
        backward = time.perf_counter()
        engine.step()
        now = engine.ledger.snapshot()
        moved, before = now - before, now
        steps.append(
            {
                "seconds": time.perf_counter() - began,
                "forward": forward - began,
                "backward": backward - forward,
                "wait": moved.wait_seconds,
                "update": moved.update_seconds,
            }
        )
    engine.settle()
    moved = engine.ledger.snapshot() - first
    result = report(
        steps,
        parameters=sum(p.numel() for p in model.parameters()),
        tier_bytes=engine.ledger.tier_bytes(),
        read=moved.nvme_bytes_read / args.steps,
        written=moved.nvme_bytes_written / args.steps,
    )
    engine.close()
    return result


def run_disk(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s of 10 MB reads and 10 MB writes, both in flight, over a file laid out before; read + written."""
    from infinity.tiers.files import open_swap_files
    from infinity.tiers.io import open_engine
    from infinity.tiers.memory import host_tensor

    tile, count = 10 << 20, 200
    buffers = [host_tensor(tile) for _ in range(8)]
    engine = open_engine(block_size=1 << 20, queue_depth=32, threads=1)
    rates = []
    with open_swap_files([args.nvme_path], tile * count, name="disk bandwidth") as file:
        for position in range(count):
            engine.write(file.file, position * tile, buffers[0].data_ptr(), tile).wait()
        for _ in range(3):
            began = time.perf_counter()
            reads: deque[Any] = deque()
            writes: deque[Any] = deque()
            for position in range(count + 3):
                if len(writes) == 4:
                    writes.popleft().wait()
                if position < count:
                    address = buffers[position % 8].data_ptr()
                    reads.append((engine.read(file.file, position * tile, address, tile), position))
                if len(reads) == 3 or (position >= count and reads):
                    request, read = reads.popleft()
                    request.wait()
                    writes.append(engine.write(file.file, read * tile, buffers[read % 8].data_ptr(), tile))
            while writes:
                writes.popleft().wait()
            rates.append(2 * tile * count / (time.perf_counter() - began))
        engine.close()
    return {"rates": rates}


# -- the rounds and the table ------------------------------------------------------------------------------------------


def child(kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(step[key] for run in runs for step in run["steps"])


def summarize(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    disk = statistics.median(rate for run in runs["disk"] for rate in run["rates"])
    parameters = runs["fp32, clip 0"][0]["parameters"]
    summary: dict[str, Any] = {"parameters": parameters, "disk_gb_per_s": disk / 1e9, "rows": []}
    for clip, moments in ((clip, moments) for clip in CLIPS for moments in MOMENTS):
        plain, ours = runs[f"plain, clip {clip:g}"], runs[f"{moments}, clip {clip:g}"]
        read, written = ours[0]["read"], ours[0]["written"]
        bound = (read + written) / disk + (median(plain, "backward") if clip else 0.0)
        seconds, base = median(ours, "seconds"), median(plain, "seconds")
        allowed = max((1.7 if clip else 1.3) * base, 1.15 * bound)
        summary["rows"].append(
            {
                "moments": moments,
                "gradient_clipping": clip,
                "plain_seconds": base,
                "infinity_seconds": seconds,
                "bound_seconds": bound,
                "ratio_to_plain": seconds / base,
                "ratio_to_bound": seconds / bound,
                "allowed_seconds": allowed,
                "within": seconds <= allowed,
                "wait_seconds": median(ours, "wait"),
                "update_seconds": median(ours, "update"),
                "read_bytes_per_parameter": read / parameters,
                "written_bytes_per_parameter": written / parameters,
                "peak_rss_gb": max(run["peak_rss"] for run in ours) / 1e9,
                "plain_peak_rss_gb": max(run["peak_rss"] for run in plain) / 1e9,
            }
        )
    return summary


def table(args: argparse.Namespace, summary: dict[str, Any]) -> str:
    rows = summary["rows"]
    lines = [
        f"# One step of {summary['parameters'] / 1e6:.0f} M parameters, parameters and optimizer states on NVMe",
        "",
        f"`python bench/step.py {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
        f"{platform.processor() or platform.machine()}, {cores()} cores, torch {torch_version()}; hidden "
        f"{args.hidden}, {args.layers} "
        f"layers, {args.heads} heads, vocabulary {args.vocab}, sequence {args.sequence}, batch {args.batch}, bf16, "
        "AdamW, untied head. "
        f"Medians of {args.rounds} processes of {args.steps} steps each, the kinds taking turns. Disk, read and "
        "write mixed: "
        f"{summary['disk_gb_per_s']:.2f} GB/s in sum.",
        "",
        "| | " + " | ".join(_column(row) for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    names = {
        "infinity_seconds": "step, s",
        "plain_seconds": "plain in-memory loop, s",
        "ratio_to_plain": "ratio to plain",
        "bound_seconds": "bound, s",
        "ratio_to_bound": "ratio to bound",
        "allowed_seconds": "allowed (max(1.3 or 1.7 × plain, 1.15 × bound)), s",
        "wait_seconds": "compute waited for I/O, s",
        "update_seconds": "in Adam, beside compute, s",
        "read_bytes_per_parameter": "read, bytes per parameter",
        "written_bytes_per_parameter": "written, bytes per parameter",
        "peak_rss_gb": "peak RSS, GB",
        "plain_peak_rss_gb": "peak RSS of plain, GB",
    }
    lines += [f"| {name} | " + " | ".join(f"{row[key]:.2f}" for row in rows) + " |" for key, name in names.items()]
    return "\n".join(lines) + "\n"


def _column(row: dict[str, Any]) -> str:
    clip = row["gradient_clipping"]
    return f"{row['moments']} moments" + (f", clipping {clip:g}" if clip else "")


def cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def main() -> None:
    args = arguments()
    if args.only:
        what, _, clip = args.only.partition(", clip ")
        if what == "disk":
            print(json.dumps(run_disk(args)))
        elif what == "plain":
            print(json.dumps(run_plain(args, float(clip))))
        else:
            print(json.dumps(run_infinity(args, float(clip), what)))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind in KINDS:
            runs[kind].append(child(kind))
            latest = runs[kind][-1]
            shown = (
                f"{median([latest], 'seconds'):.2f} s a step"
                if "steps" in latest
                else f"{max(latest['rates']) / 1e9:.2f} GB/s"
            )
            print(f"round {number + 1}/{args.rounds}  {kind:18}  {shown}", flush=True)
    summary = summarize(args, runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")
    text = table(args, summary)
    (RESULTS / f"{args.name}.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()

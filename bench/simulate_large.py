"""Time to simulate a step of a large model on many ranks, and the step that the simulation predicts.

    python bench/simulate_large.py                              # 1 T parameters on 512 ranks of 32 nodes
    python bench/simulate_large.py --trace trace.json           # the timeline of the step, too

The bandwidths are assumptions, which the page states. Everything is on nvme. Writes bench/results/simulate_large.json,
then draws bench/results/simulate_large.md from it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

import harness
from infinity.config import Config
from infinity.observe.timeline import LANES, seconds, union, within
from infinity.sim.device import DeviceFacts
from infinity.sim.gpt2 import GPT2Config, gpt2
from infinity.sim.machine import Links
from infinity.sim.ranks import Ranks
from infinity.sim.simulate import Simulation, simulate
from infinity.sizes import parse_size
from report.page import publish

LINKS = Links(
    nvme_read=25e9,
    nvme_write=12e9,
    nvme_mixed=20e9,
    memory=100e9,
    host_to_device=12e9,
    device_to_host=12e9,
    collective=12e9,
    flops={"float32": 15e12, "bfloat16": 100e12, "float16": 100e12},
    baseline_rss=0,
)
BINS = 300
"""Parts of the step for which the busy share of each lane is kept."""
DEVICE = DeviceFacts(host_addressable=False, nbytes=32 << 30, bandwidth=0.9e12, processors=6)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "simulate_large")
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=25600)
    parser.add_argument("--heads", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--tile", default="2GiB", help="largest fp32 weight of a linear layer that is no tile")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--per-node", type=int, default=16, help="ranks of a node, which share its drive and memory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last step as a Chrome trace")
    return parser.parse_args(arguments)


def config_of(args: argparse.Namespace) -> Config:
    offload = {"device": "nvme", "nvme_path": "/"}
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": args.batch,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        }
    )


def busy(step: Simulation) -> dict[str, list[float]]:
    """Lane → busy share of each of `BINS` parts of the step."""
    start, width = step.steps[-2].time, step.seconds / BINS
    found = {}
    for lane in LANES:
        work = union((one.start, one.end) for one in step.records if one.lane == lane)
        edges = [start + number * width for number in range(BINS)]
        found[lane] = [round(seconds(within(work, edge, edge + width)) / width, 3) for edge in edges]
    return {lane: shares for lane, shares in found.items() if any(shares)}


def main() -> None:
    args = parse()
    path = harness.target(args)
    if not args.redraw:
        harness.write_json(path, simulated(args))
    publish(path)


def simulated(args: argparse.Namespace) -> harness.Result:
    shape = GPT2Config(
        vocab_size=args.vocab,
        seq_length=args.sequence,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        checkpoint_activations=True,
        tie_word_embeddings=False,  # a tied head cannot be tiled
    )
    began = time.process_time()
    model = gpt2(shape, parse_size(args.tile)).module
    built = time.process_time()
    tokens = torch.zeros(args.batch, args.sequence + 1, dtype=torch.int64)
    step = simulate(
        model,
        config_of(args),
        LINKS,
        batch=(tokens[:, :-1], tokens[:, 1:]),
        device=DEVICE,
        ranks=Ranks(args.ranks, args.per_node),
        steps=args.steps,
    )
    ended = time.process_time()
    if args.trace:
        harness.replace_text(args.trace, json.dumps(step.chrome_trace()))
    return {
        **harness.head("simulate_large"),
        "shape": asdict(shape),
        "parameters": shape.num_parameters,
        "units": len(step.plan.units),
        "ranks": [args.ranks, args.per_node],
        "batch": args.batch,
        "tile": args.tile,
        "steps": args.steps,
        "process_seconds": {"model": built - began, "simulation": ended - built},
        "step_seconds": step.seconds,
        "compute_seconds": step.compute_seconds,
        "flops": step.flops,
        "exposed": dict(step.exposed),
        "moved": dict(step.moved),
        "peak_bytes": dict(step.peak_bytes),
        "activation_bytes": step.working_bytes,
        "busy": busy(step),
        "links": asdict(LINKS),
        "device": asdict(DEVICE),
    }


if __name__ == "__main__":
    main()

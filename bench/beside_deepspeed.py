"""One training: a script under DeepSpeed and `infinity.deepspeed`, and a plain loop, in processes on the CPU.

    pip install deepspeed==0.19.8     # into the environment that has this project; needs a C++ compiler and libaio-dev
    python bench/beside_deepspeed.py --path /local_nvme --small /mnt/of_300_MB

The script and its config are the same but for the import. All states are in host memory, or all on NVMe. The plain
PyTorch loop beside them trains the same model in bf16 with fp32 masters, in host memory. `start` is from the import of
the engine to the end of the first step. DeepSpeed compiles its extensions in it, once per machine, so that its first
start is measured apart, with an empty TORCH_EXTENSIONS_DIR. `peak RSS` is that of the process, Python and torch
included, and `left` are the bytes in --path after its end. The faults are a file system without room for the states
(--small, a folder on one), and SIGKILL after two steps. Writes bench/results/beside_deepspeed.json, then draws
beside_deepspeed.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import training
from peers.contenders import DeepSpeedLoop, Loop, job_environment
from report.page import publish
from zero_contenders import Contender, TorchLoop

ENGINES = ("DeepSpeed", "Infinity")
PLACEMENTS = ("cpu", "nvme")
PLAIN = "plain, cpu"
CLIP = 1.0
FAULTS = ("full disk", "killed")
KINDS = [PLAIN, *(f"{engine}, {placement}" for placement in PLACEMENTS for engine in ENGINES)]


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "beside_deepspeed")
    training.add_shape(parser, hidden=768, layers=12, heads=12, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, after that of its start")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--small", default="", help="folder on a file system without room for the states")
    parser.add_argument("--extensions", default="", help="folder of DeepSpeed's compiled modules; by default a new one")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a process counts as hanging")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--states", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the script that both run ------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace, placement: str, folder: str) -> dict[str, Any]:
    """DeepSpeed's keys: devices and paths, and its defaults for the rest."""
    device = {"device": "cpu"} if placement == "cpu" else {"device": "nvme", "nvme_path": folder}
    return {
        "train_batch_size": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
    }


def plain_loop(args: argparse.Namespace) -> TorchLoop:
    """bf16 parameters, fp32 masters and AdamW's moments in host memory."""
    import torch

    torch.manual_seed(0)
    shape = argparse.Namespace(device="cpu", dtype="bf16", clip=CLIP)
    return TorchLoop(shape, Contender("plain", "plain", 0), training.make_gpt2(args, tied=False))


def train(args: argparse.Namespace, engine_name: str, placement: str, folder: str, stop: int | None) -> None:
    """Print a JSON object with times, losses and the peak of this process. stop: SIGKILL after that many steps."""
    model_config, batch = training.config_of(args, tied=False), training.random_batches(args)
    began = time.perf_counter()
    loop: Loop
    if engine_name == "plain":
        loop = plain_loop(args)
    else:
        module = "deepspeed" if engine_name == "DeepSpeed" else "infinity.deepspeed"
        loop = DeepSpeedLoop(module, model_config, config_of(args, placement, folder))
    losses, times = [], []
    for number in range(1 + args.steps):
        tokens, targets = batch()
        if number == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        loss = loop.step(tokens, targets)
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        if number == 0:
            first = time.perf_counter() - began
    cpu = time.process_time()
    print(
        json.dumps({"start": first, "steps": times[1:], "losses": losses, "peak_rss": harness.peak_rss(), "cpu": cpu})
    )


# -- its processes -----------------------------------------------------------------------------------------------------


def start(args: argparse.Namespace, what: str, states: str, extensions: str) -> dict[str, Any]:
    """Run one process; see `harness.attempt`. extensions: folder of DeepSpeed's compiled modules."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", what, "--states", states]
    return harness.attempt(command, environment=job_environment(TORCH_EXTENSIONS_DIR=extensions), limit=args.limit)


def measured(args: argparse.Namespace, kind: str, extensions: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.path) as states:
        found = start(args, kind, states, extensions)
        left = nbytes(states)
    if found["status"] != 0 or "start" not in found:
        sys.exit(f"{kind} ended with {found['status']}: {found['error']}")
    return {**found, "left": left}


def fault(args: argparse.Namespace, engine: str, name: str, extensions: str) -> dict[str, Any]:
    parent = args.small if name == "full disk" else args.path
    with tempfile.TemporaryDirectory(dir=parent) as states:
        found = start(args, f"{engine}, nvme, {name}", states, extensions)
        left = nbytes(states)
    return {"status": found["status"], "error": found["error"], "left": left}


def nbytes(folder: str) -> int:
    """Return the bytes of the files in a folder."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def outcomes(args: argparse.Namespace, extensions: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in FAULTS:
        if name == "full disk" and not args.small:
            continue
        for engine in ENGINES:
            found[f"{engine}, {name}"] = fault(args, engine, name, extensions)
            print(f"{engine}, {name}: {found[f'{engine}, {name}']}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    args = arguments()
    if args.only:
        engine, placement, *name = args.only.split(", ")
        train(args, engine, placement, args.states, stop=2 if name == ["killed"] else None)
        return
    target = harness.target(args)
    if not args.redraw:
        with tempfile.TemporaryDirectory() as empty:
            extensions = args.extensions or empty
            first = {engine: measured(args, f"{engine}, nvme", empty) for engine in ENGINES if not args.extensions}
            run = partial(measured, args, extensions=extensions)
            runs = harness.collect(KINDS, args.rounds, run, lambda found: f"{min(found['steps']):.2f} s")
            faults = outcomes(args, extensions)
        flags = {name: getattr(args, name) for name in (*training.SHAPE, "rounds", "steps", "limit")}
        result = {**harness.head("beside_deepspeed", path=args.path), "args": flags}
        harness.write_json(target, {**result, "first": first, "runs": runs, "faults": faults})
    publish(target)


if __name__ == "__main__":
    main()

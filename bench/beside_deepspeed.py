"""One training script, run by DeepSpeed and by `infinity.deepspeed`, each in processes of its own on the CPU.

    pip install deepspeed==0.19.8                  # into the environment that has this project; needs a C++ compiler
    python bench/beside_deepspeed.py --path /local_nvme --small /mnt/of_300_MB

The script and its config are the same but for the import. All states are in host memory, or all on NVMe. `start` is
from the import of the engine to the end of the first step. DeepSpeed compiles its extensions in it, once per machine,
so that its first start is measured apart, with an empty TORCH_EXTENSIONS_DIR. `peak RSS` is that of the process,
Python and torch included, and `left` are the bytes in --path after its end. The faults are a file system without room
for the states (--small, a folder on one), and SIGKILL after two steps. Writes bench/results/beside_deepspeed.json,
then draws beside_deepspeed.md from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import training
from report.page import publish

ENGINES = ("DeepSpeed", "Infinity")
PLACEMENTS = ("cpu", "nvme")
FAULTS = ("full disk", "killed")
KINDS = [f"{engine}, {placement}" for placement in PLACEMENTS for engine in ENGINES]


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
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
    }


def train(args: argparse.Namespace, engine_name: str, placement: str, folder: str, stop: int | None) -> None:
    """Print a JSON object with times, losses and the peak of this process. stop: SIGKILL after that many steps."""
    import torch

    model_config = training.config_of(args, tied=False)
    from infinity.gpt2.model import GPT2

    began = time.perf_counter()
    if engine_name == "DeepSpeed":
        deepspeed = importlib.import_module("deepspeed")
    else:
        deepspeed = importlib.import_module("infinity.deepspeed")
    config = config_of(args, placement, folder)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT2(model_config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    losses, times = [], []
    for number in range(1 + args.steps):
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator)
        if number == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        if number == 0:
            first = time.perf_counter() - began
    cpu = time.process_time()
    print(
        json.dumps({"start": first, "steps": times[1:], "losses": losses, "peak_rss": harness.peak_rss(), "cpu": cpu})
    )


# -- its processes -----------------------------------------------------------------------------------------------------


def environment(extensions: str) -> dict[str, str]:
    """Variables of a job of one process. extensions: folder of DeepSpeed's compiled modules."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    others = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions, "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **single, **others}


def start(args: argparse.Namespace, what: str, states: str, extensions: str) -> dict[str, Any]:
    """Run one process. Returns what it printed, its status (a signal is negative; None: it hung) and its last error."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", what, "--states", states]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(extensions)
    ) as process:
        try:
            out, errors = process.communicate(timeout=args.limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            status = None
    lines = [line for line in out.splitlines() if line.startswith('{"start"')]
    problem = re.compile(r"(?:\[rank0\]: )?([\w.]*(?:Error|Exception|Assert|terminate).*)")
    last = [match[1] for match in map(problem.match, errors.splitlines()) if match]
    found = json.loads(lines[-1]) if lines else {}
    return {**found, "status": status, "error": last[-1] if last else "", "seconds": time.perf_counter() - began}


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

"""Simulate steps of the 10 B GPT-2 on a device with stated speeds: busy and exposed time of its compute stream.

    python bench/simulate_step.py                                    # both machines, all cases; into bench/results
    python bench/simulate_step.py --machine h200 --unit-size auto --results /tmp --sites
    python bench/simulate_step.py --machine v100 --update during_backward --unit-size auto --trace trace.json

The engine's own code runs on the late device of tests/late, in virtual time: kernels, copies and host work take a
computed time and compute nothing, and memory is reserved but not used. All states are in host memory (placement "cpu"),
or on the device as far as `infinity.memory.device` goes: cases with {device_memory}.
`during_backward` trains in bf16 without clipping, `next_forward` in fp16 with clipping 1. The loss is read after each
step. The first step records the trace and the second is the first to follow it. Tables show later ones.

A phase ends when the compute stream has done its work. Busy is the time of the model's kernels. The engine's own
kernels (fingerprints, copies of gradients) count beside it. Each gap between two kernels belongs to the lane that ended
it. Compute of other streams, and host threads that share memory, do not slow one another.
`--sites` names the engine's lines at which the model's thread waited. Assumptions:
{assumptions}
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import harness
from gpt2_10b import SHAPE
from gpt2_flags import add_shape, positive, shape_of
from infinity.config import Config
from infinity.engine.initialize import initialize
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.tier_kind import TierKind
from report.page import publish

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from late import exposed
from late.clock import Clock, Rates, start
from late.simulated import Host, blank, simulated

MACHINES = {
    "h200": (Rates(), Host()),
    "v100": (
        Rates(device=0.8e12, half=80e12, single=14e12, to_device=12e9, from_device=12e9),
        Host(device_nbytes=30 << 30),
    ),
}
NAMES = [f.name for kind in (Rates, Host) for f in fields(kind)]
UPDATES: dict[str, dict[str, Any]] = {
    "during_backward": {"bf16": {"enabled": True}},
    "next_forward": {"fp16": {"enabled": True, "initial_scale_power": 12}, "gradient_clipping": 1.0},
}
UNIT_SIZES = ("auto", "64MiB")
DEVICE_MEMORIES = ("", "30GiB")
"""infinity.memory.device; empty: no states on the device."""
PHASES = ("forward", "backward", "step")


def speeds(machine: str, changes: Sequence[str]) -> tuple[Rates, Host]:
    """Return the rates of a machine with some of them replaced: "name=value"."""
    given = {name: float(value) for name, _, value in (change.partition("=") for change in changes)}
    if unknown := given.keys() - set(NAMES):
        sys.exit(f"--set: there is no rate {', '.join(unknown)}. Known are {', '.join(NAMES)}.")
    rates, host = MACHINES[machine]
    own = [{key: value for key, value in given.items() if hasattr(one, key)} for one in (rates, host)]
    return replace(rates, **own[0]), replace(host, **own[1])


def assumptions(machine: str, changes: Sequence[str] = ()) -> str:
    """Return the rates of a machine in a line."""
    rates, host = speeds(machine, changes)
    return (
        f"{machine}: {rates.half / 1e12:g} TFLOP/s in 16 bits ({rates.single / 1e12:g} in fp32), device memory "
        f"{rates.device / 1e12:g} TB/s, link {rates.to_device / 1e9:g} GB/s to and {rates.from_device / 1e9:g} GB/s "
        f"from the device, host memory {host.memory / 1e9:g} GB/s for each thread that works on it; a kernel or copy "
        f"costs the host {rates.launch * 1e6:g} µs, an event {rates.event * 1e6:g} µs"
        + (
            f"; gradients that the host adds while Adam runs have one core of {host.core / 1e9:g} GB/s"
            if host.core
            else ""
        )
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    lines = "\n".join(f"  {assumptions(machine)}" for machine in MACHINES)
    doc = (__doc__ or "").format(assumptions=lines, device_memory=DEVICE_MEMORIES[-1])
    parser = harness.make_parser(doc, "simulate_step")
    parser.add_argument("--machine", choices=MACHINES, help="machine to simulate (default: each)")
    parser.add_argument("--update", choices=UPDATES, help="schedule of updates (default: each)")
    parser.add_argument("--unit-size", metavar="SIZE", help=f"infinity.unit_size (default: {' and '.join(UNIT_SIZES)})")
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="infinity.memory.device; empty for none (default: none and 30GiB)"
    )
    parser.add_argument("--moments", default="8bit", help="format of the optimizer's moments (8bit)")
    parser.add_argument("--batch", type=positive, default=10, metavar="N", help="sequences of a step (10)")
    parser.add_argument(
        "--steps", type=positive, default=4, metavar="N", help="steps; tables show the third and later ones (4)"
    )
    parser.add_argument("--sites", action="store_true", help="print the lines at which the model's thread waited")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last step of one case as a Chrome trace")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"replace a rate: one of {', '.join(NAMES)}"
    )
    parser.add_argument("--only", nargs=4, help=argparse.SUPPRESS)
    add_shape(parser, SHAPE)
    args = parser.parse_args(arguments)
    if args.steps < 3:
        parser.error("--steps must be at least 3: tables show the third and later ones")
    if args.trace and not (args.machine and args.update and args.unit_size and args.device_memory is not None):
        parser.error("--trace shows one case: give --machine, --update, --unit-size and --device-memory")
    return args


def config_of(args: argparse.Namespace, update: str, unit_size: str, device_memory: str) -> Config:
    """Return the configuration of bench/configs/gpt2_10b_v100.json with another schedule, unit size and budget."""
    memory = {"device": device_memory} if device_memory else {}
    offload = {"device": "cpu", "pin_memory": True}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    return Config.load(
        {
            "train_batch_size": args.batch,
            "train_micro_batch_size_per_gpu": args.batch,
            "steps_per_print": 0,
            "optimizer": optimizer,
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "infinity": {
                "moments": args.moments,
                "unit_size": unit_size,
                "cache_bytes": 0,
                "update": update,
                "memory": memory,
            },
            **UPDATES[update],
        }
    )


def simulate(
    clock: Clock, host: Host, shape: GPT2Config, config: Config, steps: int
) -> tuple[list[tuple[float, ...]], dict[TierKind, int]]:
    """Train `steps` steps. Returns for each when it began, and when its phases ended; and the plan's bytes by tier."""
    batch = config.train_micro_batch_size_per_gpu
    assert batch is not None
    found = []
    with simulated(host) as device:
        with torch.device("meta"):
            model = GPT2(shape)
        engine = initialize(model=blank(model), config=config, device=device)[0]
        tokens = torch.zeros(batch, shape.seq_length + 1, dtype=torch.int64, device=device.torch_device)
        for _ in range(steps):
            times = [clock.reached()]
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            times.append(clock.reached())
            engine.backward(loss)
            times.append(clock.reached())
            engine.step()
            loss.item()
            times.append(clock.reached())
            found.append(tuple(times))
        held = engine.parts.plan.peak_nbytes()
        engine.close()
    return found, held


def run(args: argparse.Namespace, machine: str, update: str, unit_size: str, device_memory: str) -> harness.Result:
    """Simulate one case in this process, where virtual time begins only once."""
    logging.getLogger("infinity").setLevel(logging.WARNING)
    rates, host = speeds(machine, args.set)
    clock = start(rates)
    config = config_of(args, update, unit_size, device_memory)
    steps, held = simulate(clock, host, shape_of(args), config, args.steps)
    log = exposed.Log.of(clock)
    parts = exposed.parts(log, steps[1][0], steps[-1][-1])
    if args.trace:
        harness.replace_text(args.trace, json.dumps(exposed.chrome_trace(log, steps[-1][0], steps[-1][-1])))
    return {
        "steps": [
            {name: exposed.sums(parts, *times[n : n + 2]) for n, name in enumerate(PHASES)} for times in steps[1:]
        ],
        "occupied": [
            {name: exposed.occupied(log, *times[n : n + 2]) for n, name in enumerate(PHASES)} for times in steps[1:]
        ],
        "held": held,
        "seconds": [times[-1] - times[0] for times in steps[1:]],
        "sites": exposed.sites(parts, steps[-1][0], steps[-1][-1]),
    }


def variants(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return pairs of a unit size and the device's memory. By default, only one unit size has a budget."""
    sizes = [args.unit_size] if args.unit_size else list(UNIT_SIZES)
    memories = DEVICE_MEMORIES if args.device_memory is None else (args.device_memory,)
    return [(size, memory) for size in sizes for memory in memories if not memory or size == sizes[0]]


def main() -> None:
    args = parse()
    if args.only:
        print(json.dumps(run(args, *args.only)))
        return
    path = harness.target(args)
    if args.redraw:
        publish(path)
        return
    machines = [args.machine] if args.machine else list(MACHINES)
    result = {
        **harness.head("simulate_step"),
        "assumptions": [assumptions(machine, args.set) for machine in machines],
        "shape": asdict(shape_of(args)) | {"parameters": shape_of(args).num_parameters, "batch": args.batch},
        "moments": args.moments,
        "runs": {},
    }
    updates = [args.update] if args.update else list(UPDATES)
    for machine, update, (unit_size, device_memory) in product(machines, updates, variants(args)):
        case = machine, update, unit_size, device_memory
        name = ", ".join(filter(None, case))
        print(f"{name} …", file=sys.stderr, flush=True)
        one = harness.run_child(__file__, [*sys.argv[1:], "--only", *case])
        result["runs"][name] = one
        if args.sites:
            print(f"\n{name}: exposed seconds of the last step")
            print(*(f"  {seconds:.4f}  {site}" for site, seconds in one["sites"].items()), sep="\n", flush=True)
    harness.write_json(path, result)
    publish(path)


if __name__ == "__main__":
    main()

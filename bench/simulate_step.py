"""Simulate steps of the 10 B GPT-2 on a GPU with stated speeds: busy and exposed time of its compute stream.

    python bench/simulate_step.py                               # all cases, by both clocks; into bench/results
    python bench/simulate_step.py --machine h200 --case bf16 --device-memory 30GiB --results /tmp
    python bench/simulate_step.py --set wakeup_latency=2.5e-4 --config infinity.unit_size=64MiB --results /tmp

`infinity.sim` runs the engine's own code on a virtual clock. All states are in host memory (placement "cpu"), or on the
device as far as `infinity.memory.device` goes: cases with a size. The first step records the trace, the second is the
first to follow it, and tables show the last one.

Busy is the time of the model's kernels. The engine's own kernels (fingerprints, copies of gradients) count beside it.
Each gap belongs to the lane that the model waited for; `host` is the model's thread: Python, launches and wake-ups.
The clock `ideal` is the clock without them, on which Adam and gradients share no threads. With `one DRAM`, copies take
their bytes from the bandwidth of Adam.
Assumptions:
{assumptions}
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import harness
from gpt2_10b import SHAPE
from gpt2_flags import add_shape, positive, shape_of
from infinity.config import Config
from infinity.engine.training_runner import TrainingRunner
from infinity.observe.timeline import seconds, union, within
from infinity.sim.device import DeviceFacts
from infinity.sim.gpt2 import gpt2
from infinity.sim.machine import OVERHEADS, Links
from infinity.sim.simulate import Simulation, simulate
from infinity.tier_kind import TierKind
from report.page import publish


def links(memory: float, link: float, half: float, single: float) -> Links:
    flops = {"float32": single, "bfloat16": half, "float16": half}
    return Links(None, None, None, memory, link, link, None, flops, 0)


MACHINES = {
    "h200": (links(150e9, 50e9, 500e12, 50e12), DeviceFacts(False, 139 << 30, 4e12, 16)),
    "h200 as measured": (
        replace(links(116.5e9, 54.5e9, 550e12, 50e12), wakeup_latency=250e-6),
        DeviceFacts(False, 139 << 30, 4e12, 16),
    ),
    "v100": (links(150e9, 12e9, 80e12, 14e12), DeviceFacts(False, 30 << 30, 0.8e12, 16)),
}
DEFAULT = ("h200", "h200 as measured")
NAMES = [f.name for f in fields(Links) if f.type in ("float", "float | None")] + ["half", "processors"]
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, clipping": {"bf16": {"enabled": True}, "gradient_clipping": 1.0},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
}
CASES |= {f"{case}, drafts": {**CASES[case], "host": "160GiB"} for case in ("bf16, clipping", "fp16")}
"""Name → keys; host: infinity.memory.host, in which second slots of all states fit, so that updates may be drafts."""
DEVICE_MEMORIES = ("", "30GiB")
"""infinity.memory.device; empty: no states on the device."""
CLOCKS = {"ideal": dict.fromkeys(OVERHEADS, 0.0) | {"processors": 1}, "": {}, "one DRAM": {}}
"""Name → rates that a clock replaces."""
FINGERPRINTS, GRADIENTS = "fingerprint", "gradients on device"
"""Names of the engine's own kernels."""


def speeds(machine: str, changes: Sequence[str], clock: str = "") -> tuple[Links, DeviceFacts]:
    """Return the rates of a machine with some of them replaced: "name=value"."""
    given = CLOCKS[clock] | {name: float(value) for name, _, value in (change.partition("=") for change in changes)}
    if unknown := given.keys() - set(NAMES):
        sys.exit(f"--set: there is no rate {', '.join(unknown)}. Known are {', '.join(NAMES)}.")
    rates, facts = MACHINES[machine]
    half, processors = given.pop("half", rates.flops["bfloat16"]), int(given.pop("processors", facts.processors))
    flops = {**rates.flops, "bfloat16": half, "float16": half}
    changed: dict[str, Any] = {**given, "flops": flops}
    rates = replace(rates, **changed)
    if clock == "one DRAM":
        rates = replace(rates, dram=rates.memory)
    return rates, replace(facts, processors=processors)


def assumptions(machine: str, changes: Sequence[str] = ()) -> str:
    """Return the rates of a machine in a line."""
    rates, facts = speeds(machine, changes)
    assert rates.host_to_device and rates.device_to_host and rates.flops["bfloat16"] and facts.bandwidth
    return (
        f"{machine}: {rates.flops['bfloat16'] / 1e12:g} TFLOP/s in 16 bits, device memory {facts.bandwidth / 1e12:g} "
        f"TB/s, link {rates.host_to_device / 1e9:g} GB/s to and {rates.device_to_host / 1e9:g} GB/s from the device, "
        f"host memory {rates.memory / 1e9:g} GB/s for {facts.processors} processors"
        + (f" and {rates.dram / 1e9:g} GB/s with copies" if rates.dram else "")
        + f"; a wake-up takes {rates.wakeup_latency * 1e6:g} µs, a launch {rates.launch_overhead * 1e6:g} µs, the use "
        f"of a unit {rates.unit_overhead * 1e6:g} µs of Python"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    lines = "\n".join(f"  {assumptions(machine)}" for machine in MACHINES)
    parser = harness.make_parser((__doc__ or "").format(assumptions=lines), "simulate_step")
    parser.add_argument("--machine", choices=MACHINES, help=f"machine to simulate (default: {' and '.join(DEFAULT)})")
    parser.add_argument("--case", choices=CASES, help="format and clipping (default: each)")
    parser.add_argument("--clock", choices=CLOCKS, help="clock; empty: that of infinity plan (default: each)")
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="infinity.memory.device; empty for none (default: none and 30GiB)"
    )
    parser.add_argument("--batch", type=positive, default=10, metavar="N", help="sequences of a step (10)")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="steps; tables show the last one (4)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last case's last step as a Chrome trace")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"replace a rate: one of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=JSON", help="set a key, such as infinity.unit_size=64MiB"
    )
    add_shape(parser, SHAPE)
    args = parser.parse_args(arguments)
    if args.steps < 3:
        parser.error("--steps must be at least 3: tables show the last one, after the trace")
    return args


def config_of(args: argparse.Namespace, case: str, device_memory: str) -> Config:
    """Return the configuration of bench/configs/gpt2_10b_v100.json in another format, with the keys of --config."""
    offload = {"device": "cpu", "pin_memory": True}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    memory = {"device": device_memory} if device_memory else {}
    own = dict(CASES[case])
    if host := own.pop("host", None):
        memory["host"] = host
    content = {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": args.batch,
        "steps_per_print": 0,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"moments": "8bit", "cache_bytes": 0, "memory": memory},
        **own,
    }
    for given in args.config:
        key, _, value = given.partition("=")
        *path, last = key.split(".")
        section: Any = content
        for name in path:
            section = section.setdefault(name, {})
        section[last] = _parsed(value)
    return Config.load(content)


def _parsed(value: str) -> Any:
    """Return a JSON value, or the text itself: sizes need no quotes."""
    try:
        return json.loads(value)
    except ValueError:
        return value


@contextmanager
def labelled() -> Iterator[None]:
    """Name the kernels that the model's thread issues for gradients."""

    def naming(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(runner: Any, *arguments: Any) -> Any:
            with runner._device._clock.naming(GRADIENTS):
                return method(runner, *arguments)

        return call

    with ExitStack() as patches:
        for name in ("arrived", "end_backward"):
            patches.enter_context(patch.object(TrainingRunner, name, naming(getattr(TrainingRunner, name))))
        yield


def run(args: argparse.Namespace, clock: str, machine: str, case: str, device_memory: str) -> harness.Result:
    """Simulate one case."""
    logging.getLogger("infinity").setLevel(logging.WARNING)
    rates, facts = speeds(machine, args.set, clock)
    shape = shape_of(args)
    tokens = torch.zeros(args.batch, shape.seq_length + 1, dtype=torch.int64)
    with labelled():
        found = simulate(
            gpt2(shape).module,
            config_of(args, case, device_memory),
            rates,
            batch=(tokens[:, :-1], tokens[:, 1:]),
            device=facts,
            steps=args.steps,
        )
    if args.trace:
        harness.replace_text(args.trace, json.dumps(found.chrome_trace()))
    return result_of(found)


def result_of(found: Simulation) -> harness.Result:
    """Return seconds of the last step: of all lanes, which add up to it; of Adam; of waits by reason."""
    start, end = found.steps[-2].time, found.steps[-1].time

    def worked(select: Callable[[Any], bool]) -> float:
        return seconds(within(union((one.start, one.end) for one in found.records if select(one)), start, end))

    def own(name: str) -> float:
        return worked(lambda one: one.lane == "compute" and one.thread == "model" and one.name == name)

    kernels = {name: own(name) for name in (FINGERPRINTS, GRADIENTS)}
    exposed = dict(found.exposed)
    host = exposed.pop("compute", 0.0)
    return {
        "lanes": {"busy": found.compute_seconds - sum(kernels.values()), **kernels, **exposed, "host": host},
        "adam": worked(lambda one: one.lane == "update"),
        "waits": {reason: asdict(wait) for reason, wait in found.waits.items()},
        "held": {tier: found.peak_bytes[tier] for tier in (TierKind.DEVICE, TierKind.HOST)},
        "seconds": [after.time - before.time for before, after in zip(found.steps[1:], found.steps[2:], strict=False)],
    }


def main() -> None:
    args = parse()
    path = harness.target(args)
    if args.redraw:
        publish(path)
        return
    machines = [args.machine] if args.machine else DEFAULT
    memories = DEVICE_MEMORIES if args.device_memory is None else (args.device_memory,)
    clocks = CLOCKS if args.clock is None else (args.clock,)
    result = {
        **harness.head("simulate_step"),
        "assumptions": [assumptions(machine, args.set) for machine in machines],
        "shape": asdict(shape_of(args)) | {"parameters": shape_of(args).num_parameters, "batch": args.batch},
        "runs": {},
    }
    for machine, case, memory, clock in product(machines, [args.case] if args.case else CASES, memories, clocks):
        name = ", ".join(filter(None, (machine, case, memory, clock)))
        print(f"{name} …", file=sys.stderr, flush=True)
        result["runs"][name] = run(args, clock, machine, case, memory)
        harness.write_json(path, result)
    publish(path)


if __name__ == "__main__":
    main()

"""Simulate steps with every order in which `infinity.memory.host` gives room to states, beside the engine's own order.

    python bench/simulate_order.py                                   # all cases; into bench/results
    python bench/simulate_order.py --machines v100 --moments 8bit --results /tmp

A step is the third of a GPT-2 whose states are on nvme, except for those that the budget holds. The engine's own code
runs on a virtual clock (`infinity.sim`). A case is a machine, a format of moments, clipping or none, micro-batches of a
step, a load and a budget:

- load: seconds in which the model computes, by the seconds in which the drive would move all states of a step
- budget: share of the states' bytes that host memory holds, besides the buffers

Orders are all permutations of the kinds of states. Units of a kind get room from the first or the last one on, or
spread evenly over the model. Orders that place alike are simulated once. The bandwidths are assumptions, printed with
the result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Any
from unittest import mock

import torch

import harness
from infinity.config import Config
from infinity.plan import budget
from infinity.plan.budget import spread
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.sim.device import DeviceFacts
from infinity.sim.gpt2 import GPT2, GPT2Config, gpt2
from infinity.sim.machine import Links, Machine
from infinity.sim.planner import plan_of
from infinity.sim.simulate import Simulation, simulate
from report.page import publish

SHAPE = GPT2Config(
    num_layers=6,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=16384,
    seq_length=512,
    checkpoint_activations=True,
    tie_word_embeddings=False,
)
V100 = Links(
    nvme_read=3e9,
    nvme_write=2e9,
    nvme_mixed=2.5e9,
    memory=150e9,
    host_to_device=12e9,
    device_to_host=12e9,
    collective=None,
    flops={"float32": 14e12, "bfloat16": 80e12, "float16": 80e12},
    baseline_rss=0,
)
H200 = replace(
    V100,
    nvme_read=12e9,
    nvme_write=8e9,
    nvme_mixed=10e9,
    host_to_device=50e9,
    device_to_host=50e9,
    flops={"float32": 50e12, "bfloat16": 500e12, "float16": 500e12},
)
MACHINES = {
    "v100": (V100, DeviceFacts(False, 32 << 30, 0.8e12, processors=16)),
    "h200": (H200, DeviceFacts(False, 140 << 30, 4e12, processors=16)),
    "v100, slow drive": (
        replace(V100, nvme_read=1e9, nvme_write=1e9, nvme_mixed=1e9),
        DeviceFacts(False, 32 << 30, 0.8e12, processors=16),
    ),
    "cpu": (
        replace(V100, memory=100e9, flops={"float32": 1e12, "bfloat16": 2e12, "float16": None}),
        DeviceFacts(processors=32),
    ),
}
MOMENTS = ("fp32", "8bit")
STEPS = (("", 1), ("clipping", 1), ("", 2), ("clipping", 2))
"""Pairs of clipping and micro-batches of a step."""
LOADS = ((0.2, 0.5), (0.6, 0.2), (0.6, 0.5))
"""Pairs of a load and a budget."""

KINDS = {State.PARAM: "parameters", State.GRAD: "gradients", State.OPTIM: "optimizer states"}
UNITS: dict[str, Callable[[Sequence[UnitLayout]], Sequence[UnitLayout]]] = {
    "first on": lambda units: units,
    "last on": lambda units: units[::-1],
    "spread": lambda units: list(spread(units)),
}


@dataclass(frozen=True)
class Case:
    machine: str
    moments: str
    clipping: str
    accumulation: int
    load: float
    share: float

    @property
    def name(self) -> str:
        batches = f"{self.accumulation} micro-batches" if self.accumulation > 1 else ""
        parts = (self.machine, self.moments, self.clipping, batches, f"load {self.load}", f"budget {self.share:.0%}")
        return ", ".join(filter(None, parts))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "simulate_order")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), help="machines to simulate")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS), help="formats of moments")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers, help=f"blocks ({SHAPE.num_layers})")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at once (1)")
    return parser.parse_args(arguments)


def cases(args: argparse.Namespace) -> list[Case]:
    every = product(args.machines, args.moments, STEPS, LOADS)
    return [Case(machine, moments, *step, *load) for machine, moments, step, load in every]


def config_of(case: Case, host: int | None) -> Config:
    place = {"device": "nvme", "nvme_path": "/"}
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_clipping": 1.0 if case.clipping else 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "infinity": {"moments": case.moments, "memory": {} if host is None else {"host": host}},
        }
    )


def planned(case: Case, shape: GPT2Config, host: int | None) -> Plan:
    facts = MACHINES[case.machine][1]
    gpus = 0 if facts.host_addressable else 1
    machine = Machine(1 << 50, 1 << 50, gpus=gpus, device_memory=facts.nbytes, processors=facts.processors)
    return plan_of(gpt2(shape), config_of(case, host), machine)


def host_bytes(case: Case, shape: GPT2Config) -> int:
    """The budget of a case: the buffers without one, and its share of the states."""
    bare = planned(case, shape, None)
    states = sum(extent.nbytes for extent in bare.placement.extents.values())
    return bare.peak_of_host() + int(case.share * states)


def sequences(case: Case, shape: GPT2Config) -> int:
    """Sequences of a micro-batch that give the case's load: 8 FLOPs a token and parameter, with recomputation."""
    links = MACHINES[case.machine][0]
    rate, drive = links.flops["bfloat16"], links.nvme_mixed
    assert rate is not None and drive is not None
    width = {"fp32": 10, "8bit": 4}[case.moments]
    moved = 2 * (2 * case.accumulation + 1) + 2 * width  # parameters, optimizer states
    stored = bool(case.clipping) or case.accumulation > 1
    moved += stored * 2 * case.accumulation * (4 if case.accumulation > 1 else 2)  # gradients
    tokens = case.load * moved / drive * rate / 8 / case.accumulation
    return max(1, round(tokens / shape.seq_length))


def simulated(case: Case, shape: GPT2Config, host: int) -> Simulation:
    links, facts = MACHINES[case.machine]
    tokens = torch.zeros(sequences(case, shape), shape.seq_length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = GPT2(shape)
    return simulate(model, config_of(case, host), links, batch=(tokens, tokens), device=facts)


# -- orders ------------------------------------------------------------------------------------------------------------


def all_orders() -> list[tuple[str, str]]:
    """Pairs of an order of kinds and one of units."""
    kinds = [", ".join(KINDS[state] for state in order) for order in permutations(KINDS)]
    return list(product(kinds, UNITS))


@contextmanager
def ordered(kinds: str, units: str) -> Iterator[None]:
    """Let budgets give room in this order, in place of the engine's."""
    turns, arranged, first = budget.turns, UNITS[units], kinds.split(", ")

    def other(*facts: Any) -> Iterator[tuple[State, list[UnitLayout]]]:
        moved, rules = dict(turns(*facts)), facts[1]

        def turn(state: State) -> tuple[bool, int]:
            """Gradients that are updated as they arrive have the last turn in every order, as the engine's."""
            return state is State.GRAD and rules.grads_pass, first.index(KINDS[state])

        for state in sorted(moved, key=turn):
            yield state, list(arranged(sorted(moved[state], key=lambda unit: unit.index)))

    with mock.patch.object(budget, "turns", other):
        yield


def placement_of(plan: Plan) -> frozenset[tuple[int, State]]:
    """The states in host memory."""
    return frozenset(key for key, extent in plan.placement.extents.items() if extent.tier == "host")


def run(case: Case, shape: GPT2Config) -> dict[str, Any]:
    """Exposed seconds of the engine's order and of all others."""
    host = host_bytes(case, shape)
    own = simulated(case, shape, host)
    known = {placement_of(own.plan): own.seconds - own.compute_seconds}
    orders = {}
    for kinds, units in all_orders():
        with ordered(kinds, units):
            place = placement_of(planned(case, shape, host))
            if place not in known:
                found = simulated(case, shape, host)
                known[place] = found.seconds - found.compute_seconds
        orders[f"{kinds}; {units}"] = round(known[place], 5)
    exposed = own.seconds - own.compute_seconds
    return {"compute": round(own.compute_seconds, 5), "engine": round(exposed, 5), "orders": orders}


def main() -> None:
    args = parse()
    path = harness.target(args)
    if args.redraw:
        publish(path)
        return
    shape = replace(SHAPE, num_layers=args.layers)
    runs: dict[str, Mapping[str, Any]] = {}
    every = cases(args)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for case, one in zip(every, pool.map(partial(run, shape=shape), every), strict=True):
            runs[case.name] = one
            best = min(one["orders"], key=one["orders"].__getitem__)
            text = f"{one['engine']:.3f} s exposed, {one['orders'][best]:.3f} s with {best}"
            print(f"{case.name}: {text}", file=sys.stderr, flush=True)
    result = {
        **harness.head("simulate_order"),
        "shape": asdict(shape) | {"parameters": shape.num_parameters},
        "machines": {name: {"links": asdict(MACHINES[name][0])} for name in args.machines},
        "runs": runs,
    }
    harness.write_json(path, result)
    publish(path)


if __name__ == "__main__":
    main()

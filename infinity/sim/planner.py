"""Predicts a training run before it starts: whether it fits, how long a step takes, and what bounds it.

Bytes are those of the plan that the engine executes, and time is that of the engine's own code on a virtual clock
(`infinity.sim.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from infinity.engine.optimizer import param_groups
from infinity.engine.planning import plan_units
from infinity.errors import ConfigError
from infinity.gpt2.model import GPT2Config
from infinity.observe.timeline import LANES
from infinity.observe.units import show_bytes
from infinity.plan.plan import Plan
from infinity.plan.policy import compute_dtype
from infinity.sim.device import DeviceFacts, Times
from infinity.sim.links import Links
from infinity.sim.machine import Machine
from infinity.sim.models import PlannedModel, gpt2
from infinity.sim.needs import Needs, advice, needs_of
from infinity.sim.ranks import Ranks
from infinity.sim.simulate import Simulation, simulate

if TYPE_CHECKING:
    from infinity.config import Config

_SECONDS_OF_A_DAY = 86_400
_EXPOSED = 0.05
"""Share of a step from which a lane is worth advice."""
_UNKNOWN = Links(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, dict.fromkeys(("float32", "bfloat16", "float16"), 1e12), 0)
"""Stands in for bandwidths that nobody measured; bytes do not depend on them."""


@dataclass(frozen=True)
class Prediction:
    """Bytes of a node and seconds of a step."""

    model: str
    parameters: int
    sequences: int
    """Sequences of a step, all ranks together."""
    needs: Needs
    simulation: Simulation
    ranks_per_node: int
    is_timed: bool
    """False: bandwidths are unknown, so that there are no seconds."""
    is_measured: bool
    """True: the model's operations were timed on this machine."""
    advice: list[str]

    @property
    def plan(self) -> Plan:
        return self.simulation.plan

    @property
    def nvme_written_a_day(self) -> float:
        """Bytes that a node writes to its drive in a day of steps."""
        return self.simulation.nvme_bytes_written * self.ranks_per_node * _SECONDS_OF_A_DAY / self.simulation.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the object of `infinity plan --json`. Bytes are those of a node."""
        step = None
        if self.is_timed:
            seen = self.simulation
            step = {
                "seconds": seen.seconds,
                "compute_seconds": seen.compute_seconds,
                "compute": "measured here" if self.is_measured else "from FLOP/s",
                "nvme_bytes_read": seen.nvme_bytes_read * self.ranks_per_node,
                "nvme_bytes_written": seen.nvme_bytes_written * self.ranks_per_node,
                "nvme_bytes_written_a_day": round(self.nvme_written_a_day),
                "exposed": {lane: seen.exposed.get(lane, 0.0) for lane in LANES if lane != "compute"},
            }
        return {
            "fits": not self.needs.limits,
            "limits": self.needs.limits,
            "peak_host_bytes": self.needs.peak["host"],
            "peak_device_bytes": self.needs.peak["device"],
            "tiers": {tier: dict(kinds) for tier, kinds in self.needs.tiers.items()},
            "passing": dict(self.needs.passing),
            "step": step,
            "advice": self.advice,
        }


def predict(
    make: Callable[[], PlannedModel],
    config: Config,
    machine: Machine,
    links: Links | None,
    times: Times | None = None,
) -> Prediction:
    """Predict training of the model that `make` returns. links: of a node of the machine; None: bytes only. times: of
    operations and kernels on the machine's host, such as `MeasuredTimes`; by default they follow from `links`.

    Raises ConfigError or ModelError for a config that cannot train the model.
    """
    config = machine.resolved(config)
    if links is not None:
        _check_flops(config, links)
    model = make()
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    batch = config.resolve_batch(machine.ranks)
    facts = machine.device_info(config)
    simulation = simulate(
        model.module,
        config,
        links or _UNKNOWN,
        batch=model.inputs(batch.micro),
        device=DeviceFacts(facts.host_addressable, facts.nbytes, processors=facts.processors),
        ranks=Ranks(machine.ranks, machine.ranks_per_node),
        times=times,
    )
    baseline = links.baseline_rss if links is not None else 0
    needs = needs_of(simulation.plan, machine, activations=simulation.working_bytes, baseline_rss=baseline)
    found = list(advice(simulation.plan, needs))
    if links is not None and not found:
        found += faster(config, simulation, needs)
    return Prediction(
        model.name,
        parameters,
        batch.train,
        needs,
        simulation,
        machine.ranks_per_node,
        is_timed=links is not None,
        is_measured=times is not None,
        advice=found,
    )


def _check_flops(config: Config, links: Links) -> None:
    """Raise ConfigError if the bandwidths lack the speed of the dtype that the model computes in."""
    dtype = str(compute_dtype(config) or torch.float32).removeprefix("torch.")
    if links.flops.get(dtype) is None:
        raise ConfigError(
            f"the bandwidths have no flops.{dtype}, in which the model computes: measure them with infinity "
            "bench-links on that machine, or add the FLOP/s"
        )


def faster(config: Config, simulation: Simulation, needs: Needs) -> Iterator[str]:
    """Yield changes that shorten the exposed lanes, the longest first, each once."""
    lanes = sorted(simulation.exposed.items(), key=lambda item: -item[1])
    free = needs.available["host"] - needs.peak["host"]
    given: set[str] = set()
    for lane, seconds in lanes:
        if seconds < _EXPOSED * simulation.seconds:
            return
        if lane in ("nvme_read", "nvme_write") and free > 0 and config.infinity.memory.host is None:
            change = f'set infinity.memory.host to "auto", since {show_bytes(free)} of host memory are free'
        elif lane in ("nvme_read", "nvme_write", "update") and config.infinity.moments == "fp32":
            change = 'infinity.moments "bf16" or "8bit" move fewer bytes'
        else:
            change = "raise the micro-batch, which moves no more bytes a step"
        if change not in given:
            given.add(change)
            yield f"the model waits {seconds:.3g} s of {simulation.seconds:.3g} s for {lane}: {change}"


def plan_of(model: PlannedModel, config: Config, machine: Machine) -> Plan:
    """Return a rank's plan, without a simulation."""
    config = machine.resolved(config)
    groups = param_groups(model.module, None)
    ranks, device, budget = machine.rank_info(config), machine.device_info(config), machine.budget(config)
    return plan_units(model.module, config, groups, ranks, device, budget)[1]


def largest(shape: GPT2Config, config: Config, machine: Machine, baseline_rss: int) -> int | None:
    """Return the most layers with which a GPT-2 of this width fits; None if one layer does not.

    Activations are simulated for one and two layers; more layers add as many bytes each as the second.
    """
    seen = [predict(partial(gpt2, replace(shape, num_layers=n)), config, machine, None) for n in (1, 2)]
    one, two = (found.simulation.working_bytes for found in seen)

    def fits(layers: int) -> bool:
        plan = plan_of(gpt2(replace(shape, num_layers=layers)), config, machine)
        activations = one + (layers - 1) * max(0, two - one)
        return not needs_of(plan, machine, activations=activations, baseline_rss=baseline_rss).limits

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

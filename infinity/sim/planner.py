"""Predicts a training run before it starts: whether it fits, how long a step takes, and what bounds it.

Bytes are those of the plan that the engine executes, and time is that of the engine's own code on a virtual clock
(`infinity.sim.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infinity.engine.budget import plan_units
from infinity.engine.client_optimizer import ClientOptimizer
from infinity.engine.optimizer.unit_optimizer import param_groups
from infinity.errors import ConfigError, InfinityError
from infinity.observe.timeline import LANES
from infinity.plan.budget import Budget
from infinity.plan.plan import Plan
from infinity.plan.policy import compute_dtype
from infinity.plan.remedy import Change, needed, remedy, trials
from infinity.plan.shortage import Shortage, exceeded
from infinity.sim.advice import Wear, drafts, faster, longer, split_updates, wear_of, whole_step
from infinity.sim.device import DeviceFacts, Times
from infinity.sim.fewer import fewer_activations, in_bf16
from infinity.sim.gpt2 import WITH_COMPILER, PlannedModel
from infinity.sim.machine import Links, Machine
from infinity.sim.needs import Needs, Savings, Variant, advice, construction, needs_of, where_to_construct
from infinity.sim.ranks import Ranks
from infinity.sim.simulate import Simulation, simulate
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config

_MOST_SIMULATED = 32
"""Number of blocks above which activations are extrapolated in any case."""
_UNKNOWN = Links(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, dict.fromkeys(("float32", "bfloat16", "float16"), 1e12), 0)
"""Placeholder for bandwidths that were not measured; bytes do not depend on them."""
_CUDA_PROCESS = 1_360_000_000
"""Host memory of a process that has used CUDA, as `infinity bench-links` measured it on an H200 (torch 2.11)."""


@dataclass(frozen=True)
class Prediction:
    """Bytes of a node and seconds of a step."""

    model: str
    parameters: int
    sequences: int
    """Sequences of a step, all ranks together."""
    tokens: int
    """Tokens of a sequence; 1: the module takes samples of its own kind."""
    needs: Needs
    plan: Plan
    ranks_per_node: int
    advice: list[str]
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config that the advice on memory changes, as in its JSON; empty if two memories need changes."""
    simulation: Simulation | None = None
    """None: bandwidths are unknown, so there are no seconds."""
    is_measured: bool = False
    """True: the model's operations were timed on this machine."""
    changed_peak: int = 0
    """Bytes of that memory with all changes; 0: no changes, or of two memories."""
    suffices: bool = True
    """False: that memory is too small with all changes, too."""
    constructed: str = ""
    """Where the model is to be constructed, if memory does not hold it beside the buffers."""
    measured_with: str = ""
    """Libraries of the process whose memory was measured here, without bandwidths; empty: it was not."""
    of_files: int = 0
    """Bytes of a node's processes that are pages of library files, as far as they are known."""
    wear: Wear | None = None
    """None: a step writes nothing to a drive, or is not simulated."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of `infinity plan --json`. Bytes are those of a node."""
        step = None
        if self.simulation is not None:
            seen = self.simulation
            step = {
                "seconds": seen.seconds,
                "compute_seconds": seen.compute_seconds,
                "compute": "measured here" if self.is_measured else "from FLOP/s",
                "nvme_bytes_read": seen.nvme_bytes_read * self.ranks_per_node,
                "nvme_bytes_written": seen.nvme_bytes_written * self.ranks_per_node,
                "activation_bytes_read": seen.activation_bytes_read * self.ranks_per_node,
                "activation_bytes_written": seen.activation_bytes_written * self.ranks_per_node,
                "nvme_bytes_written_a_day": 0 if self.wear is None else round(self.wear.a_day),
                "endurance": None if self.wear is None else self.wear.to_json(),
                "host_seconds": seen.exposed.get("compute", 0.0),
                "exposed": {lane: seen.exposed.get(lane, 0.0) for lane in LANES if lane != "compute"},
            }
        return {
            "fits": not self.needs.limits,
            "limits": self.needs.limits,
            "peak_host_bytes": self.needs.peak[TierKind.HOST],
            "peak_device_bytes": self.needs.peak[TierKind.DEVICE],
            "peak_nvme_bytes": self.needs.peak[TierKind.NVME],
            "tiers": {tier: dict(kinds) for tier, kinds in self.needs.tiers.items()},
            "passing": dict(self.needs.passing),
            "drafted": self.plan.drafted_share,
            "step": step,
            "advice": self.advice,
            "changed": self.changed,
            "changed_peak_bytes": self.changed_peak,
            "construct": self.constructed,
        }


def predict(
    make: Callable[[], PlannedModel],
    config: Config,
    machine: Machine,
    links: Links | None,
    times: Times | None = None,
    *,
    train_batch: bool = False,
    endurance: int | None = None,
) -> Prediction:
    """Predict training of the model that `make` returns.

    links: of a node of the machine; None: bytes only. times: of operations and
    kernels on the machine's host, such as `MeasuredTimes`; by default they follow from `links`. train_batch: each step
    is a call of `engine.train_batch` with blocks, in place of a loop over micro-batches. endurance: bytes that the
    drives of a node are rated for. Raises ConfigError or ModelError for a config that cannot train the model.
    """
    config = machine.resolved(config)
    if links is not None:
        _check_flops(config, links)
    model = make()
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    simulation, plan, needs = _needed(model, config, machine, links, times, train_batch=train_batch)
    budget = machine.budget(config)

    planned: dict[tuple[str, Budget], Plan | InfinityError] = {}
    once = cache(make)  # planning leaves the model as it is

    def replan(config: Config, budget: Budget) -> Plan:
        """Plan, once for each config: searches for several limits try the same ones."""
        key = config.model_dump_json(), budget
        if key not in planned:
            try:
                planned[key] = plan_of(once(), config, machine, budget)
            except InfinityError as error:
                planned[key] = error
        if isinstance(found := planned[key], InfinityError):
            raise found
        return found

    def predicted(model: PlannedModel, config: Config) -> tuple[Plan, Needs]:
        return _needed(model, config, machine, links, times, train_batch=train_batch)[1:]

    savings = Savings(
        activations=partial(fewer_activations, make, config, machine, needs, predicted),
        precision=partial(in_bf16, make, config, machine, predicted),
        remedy=lambda short: remedy(config, plan, budget, short, replan, lambda plan: next(exceeded(plan), None)),
        planned=lambda variant, short: trials(
            variant.config, variant.plan, budget, short, replan, partial(_lacks, short)
        ),
    )
    start = Variant(Change(), needs, plan, config)
    changes = [*advice(start, savings), *construction(start)]
    in_config = [change for change in changes if change.keys]
    peaks = [change.peak for change in changes if change.peak]
    found, wear = [str(change) for change in changes], None
    if simulation is not None and links is not None:
        wear = wear_of(simulation, machine.ranks_per_node, endurance)
        simulated = partial(_again, make, machine, links, times)
        if not needs.limits:
            found += faster(config, simulation, needs, checkpointed=model.checkpointed)
            if not train_batch:
                found += whole_step(simulated, config, simulation)
                found += split_updates(simulated, config, simulation)
                found += drafts(simulated, config, simulation)
        if wear is not None:
            found += longer(wear, partial(simulated, train_batch=train_batch), config, machine.ranks_per_node)
        if simulation.ordinary:
            found.append(f"train_batch runs as a loop, since {simulation.ordinary}")
    sequences = config.resolve_batch(machine.ranks).train
    return Prediction(
        model=model.name,
        parameters=parameters,
        sequences=sequences,
        tokens=model.sequence,
        needs=needs,
        plan=plan,
        ranks_per_node=machine.ranks_per_node,
        advice=found,
        changed=in_config[0].to_json() if len(in_config) == 1 else {},
        simulation=simulation,
        is_measured=simulation is not None and times is not None,
        changed_peak=peaks[0] if len(peaks) == 1 else 0,
        suffices=all(change.suffices for change in changes),
        constructed=where_to_construct(config) if needs.lacking_at_start() > 0 else "",
        measured_with=model.measured_with,
        of_files=0 if machine.gpus or links is not None else model.of_files * machine.ranks_per_node,
        wear=wear,
    )


def _needed(
    model: PlannedModel,
    config: Config,
    machine: Machine,
    links: Links | None,
    times: Times | None,
    *,
    train_batch: bool,
) -> tuple[Simulation | None, Plan, Needs]:
    """Return a simulation, None without `links`, the plan, and the memory that it needs. `model` cannot be used
    afterwards.
    """
    registered = _registered(model)
    constructed = sum(parameter.nbytes for parameter in model.module.parameters())
    if links is None:
        plan = plan_of(model, config, machine)
        activations = _activations_of(model, config, machine, train_batch=train_batch)
        assumed = assumed_rss(model, machine)
        needs = needs_of(
            plan,
            machine,
            activations=activations,
            baseline_rss=assumed,
            registered=registered,
            constructed=constructed,
        )
        return None, plan, needs
    seen = _simulated(model, config, machine, links, train_batch=train_batch, times=times)
    saved, baseline = _activations(seen), links.baseline_rss
    needs = needs_of(
        seen.plan,
        machine,
        activations=saved,
        baseline_rss=baseline,
        registered=registered,
        constructed=constructed,
    )
    return seen, seen.plan, needs


def assumed_rss(model: PlannedModel, machine: Machine) -> int:
    """Return the resident bytes of a process without its engine that are assumed if they were not measured."""
    if machine.gpus:
        return _CUDA_PROCESS
    return max(model.process, WITH_COMPILER) if model.checkpointed else model.process


def _registered(model: PlannedModel) -> int:
    """Return the bytes of the model's own buffers, such as causal masks."""
    return sum(buffer.nbytes for buffer in model.module.buffers())


def _simulated(
    model: PlannedModel,
    config: Config,
    machine: Machine,
    links: Links,
    *,
    train_batch: bool = False,
    steps: int | None = None,
    times: Times | None = None,
) -> Simulation:
    facts = machine.device_info(config)
    if steps is None:
        # Ranks know from the third step on when a unit's gradients are complete; until then, gradients are stored.
        steps = 3 if machine.ranks == 1 else 4
    return simulate(
        model.module,
        config,
        links,
        batch=model.inputs(config.resolve_batch(machine.ranks).micro),
        device=DeviceFacts(facts.host_addressable, facts.nbytes, processors=facts.processors),
        ranks=Ranks(machine.ranks, machine.ranks_per_node),
        train_batch=train_batch,
        steps=steps,
        times=times,
        free_nvme=machine.free_nvme,
    )


def _again(
    make: Callable[[], PlannedModel],
    machine: Machine,
    links: Links,
    times: Times | None,
    config: Config,
    *,
    train_batch: bool = False,
) -> tuple[Simulation, Needs]:
    """Simulate another run of the same model. Returns it and the memory that it needs."""
    seen, _, needs = _needed(make(), machine.resolved(config), machine, links, times, train_batch=train_batch)
    assert seen is not None  # `links` are known
    return seen, needs


class Activations:
    """Peak bytes of a model's results in a step, parameters excluded, by tier, on one rank, by the number of blocks.

    When backward begins, every block holds its saved tensors; at other times, fewer blocks do. So from some number of
    blocks on, each further block adds the bytes that it saves: on the device, or in the tier of saved activations.
    Models of 1, 2, 4, … blocks are simulated up to that number, and larger ones are extrapolated.
    """

    def __init__(
        self, make: Callable[[int], PlannedModel], config: Config, machine: Machine, *, train_batch: bool = False
    ) -> None:
        self._make, self._config, self._machine, self._train_batch = make, config, machine, train_batch
        self._seen: dict[int, Simulation] = {}

    def of(self, blocks: int) -> dict[TierKind, int]:
        count = 2
        while count < blocks:
            less, more = self._simulated(count // 2), self._simulated(count)
            few, many = _activations(less), _activations(more)
            grown = more.working_bytes - less.working_bytes
            if (
                grown == more.activation_bytes - less.activation_bytes and all(few.values())
            ) or count > _MOST_SIMULATED:
                added = {tier: (many[tier] - nbytes) * (blocks - count) for tier, nbytes in few.items()}
                return {tier: nbytes + max(0, added[tier]) // (count - count // 2) for tier, nbytes in many.items()}
            count *= 2
        return _activations(self._simulated(blocks))

    def _simulated(self, blocks: int) -> Simulation:
        if blocks not in self._seen:
            self._seen[blocks] = _simulated(
                self._make(blocks),
                self._config,
                self._machine,
                _UNKNOWN,
                train_batch=self._train_batch,
                steps=1 if self._config.infinity.activations.device == "none" and not self._train_batch else 3,
            )
        return self._seen[blocks]


def _lacks(short: Shortage, plan: Plan) -> Shortage | None:
    """Return `short` if the plan needs more than is available there."""
    return short if needed(plan, short.tier) > short.available else None


def _activations_of(model: PlannedModel, config: Config, machine: Machine, *, train_batch: bool) -> dict[TierKind, int]:
    """Return tier → peak bytes of the model's results. `model` cannot be used afterwards."""
    if model.with_blocks is None or train_batch:  # a shallower model may fit in the buffers, and run as a loop
        return Activations(lambda _: model, config, machine, train_batch=train_batch).of(0)
    return Activations(model.with_blocks, config, machine).of(model.blocks)


def _check_flops(config: Config, links: Links) -> None:
    """Raise ConfigError if the bandwidths lack the speed of the dtype that the model computes in."""
    dtype = str(compute_dtype(config) or torch.float32).removeprefix("torch.")
    if links.flops.get(dtype) is None:
        raise ConfigError(
            f"the bandwidths have no FLOP/s of {dtype} (flops.{dtype}), the dtype of this model: measure the machine "
            "with infinity bench-links, add the value, or pass a --config with another dtype"
        )


def _activations(simulation: Simulation) -> dict[TierKind, int]:
    """Return tier → peak bytes of the model's results there."""
    return {TierKind.DEVICE: simulation.working_bytes, **simulation.activations}


def plan_of(model: PlannedModel, config: Config, machine: Machine, budget: Budget | None = None) -> Plan:
    """Return a rank's plan, without a simulation. budget: by default that of the config."""
    config = machine.resolved(config)
    client = ClientOptimizer.of_config(config, model.module)
    groups = param_groups(model.module, None) if client is None else client.groups
    rules = () if client is None else client.rules
    ranks, device, budget = machine.rank_info(config), machine.device_info(config), budget or machine.budget(config)
    return plan_units(model.module, config, groups, ranks, device, budget, rules=rules)[1]


class Largest(NamedTuple):
    """The most blocks with which a model fits, 0 if it fits with none, and the tiers that one more exceeds."""

    blocks: int
    limits: list[TierKind]


def largest(
    make: Callable[[int], PlannedModel],
    config: Config,
    machine: Machine,
    baseline_rss: int,
    *,
    train_batch: bool = False,
) -> Largest:
    """Return the most blocks with which a model fits. make: blocks → model."""
    config = machine.resolved(config)
    activations = Activations(make, config, machine, train_batch=train_batch)

    def limits(blocks: int) -> list[TierKind]:
        model, saved = make(blocks), activations.of(blocks)
        plan, registered = plan_of(model, config, machine), _registered(model)
        return needs_of(plan, machine, activations=saved, baseline_rss=baseline_rss, registered=registered).limits

    low, high, over = 0, 1, limits(1)
    while not over:
        low, high = high, 2 * high
        over = limits(high)
    while high - low > 1:
        middle = (low + high) // 2
        found = limits(middle)
        low, high, over = (low, middle, found) if found else (middle, high, over)
    return Largest(low, over)

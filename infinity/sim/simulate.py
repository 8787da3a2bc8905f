"""Simulates training steps: the engine's own code on virtual time, on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity import concurrency
from infinity.engine.client_optimizer import ClientOptimizer
from infinity.engine.training import TrainingEngine
from infinity.engine.vertical.checks import call
from infinity.errors import ConfigError, ModelError
from infinity.nn.experts import ExpertsTile
from infinity.nn.tiling import LinearTile
from infinity.observe.ledger import Waited, between
from infinity.observe.timeline import Sample, StepSpan, chrome_trace
from infinity.plan.plan import Plan
from infinity.sim.activations import SimulatedRoom
from infinity.sim.clock import Clock, Record
from infinity.sim.compute import AsOnHost, Compute, fused_attention
from infinity.sim.device import META, DeviceFacts, SimulatedAccelerator, SimulatedDevice, SimulatedHost, Times
from infinity.sim.lanes import Boundary, exposed
from infinity.sim.machine import Links
from infinity.sim.platform import SimulatedPlatform
from infinity.sim.ranks import Ranks
from infinity.sim.threads import VirtualPrimitives
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class Simulation:
    """A step in steady state, on one rank. Bytes and seconds are those of the last simulated step."""

    seconds: float
    compute_seconds: float
    """The part of `seconds` in which the model computed."""
    exposed: Mapping[str, float]
    """Lane → seconds in which the model waited for it; compute: for its own thread, which issues operations. With
    `compute_seconds` they add up to `seconds`.
    """
    moved: Mapping[str, int]
    """Lane → bytes that it moved."""
    order: Mapping[str, Sequence[tuple[str, int]]]
    """Lane → (name, bytes) of its transfers in the order of their submission."""
    flops: float
    """Operations of matrix products and attention, recomputation included."""
    activation_bytes: int
    """Bytes of the model's results that are alive when backward begins, units excluded."""
    working_bytes: int
    """Peak of bytes of the model's results in the whole step, without those that are in another tier."""
    activations: Mapping[TierKind, int]
    """Tier → peak bytes of the saved activations that `infinity.activations` moves there, in all steps."""
    activation_bytes_read: int
    activation_bytes_written: int
    waits: Mapping[str, Waited]
    """Reason of `infinity.observe.ledger` → waits of the model's thread. Those of work on a stream count, too."""
    ordinary: str
    """Reason why `engine.train_batch` runs as a loop although it has blocks; empty if it does not."""
    plan: Plan
    steps: Sequence[Boundary]
    """The ends of steps, and before them the start of the first one."""
    records: Sequence[Record] = field(repr=False)
    """All work of all steps."""
    submitted: Sequence[Record] = field(repr=False)
    """Transfers of all steps in the order of their submission."""

    @property
    def nvme_bytes_read(self) -> int:
        return self.moved.get("nvme_read", 0)

    @property
    def nvme_bytes_written(self) -> int:
        return self.moved.get("nvme_write", 0) + self.commit_bytes_written

    @property
    def commit_bytes_written(self) -> int:
        """Bytes of trained states in memory that the commit of a durable step writes to nvme. They take no simulated
        time.
        """
        io, units = self.plan.io, self.plan.units
        if io is None or io.durable is None:
            return 0
        copied = (each for each in io.durable.extents if each.first is not each.working and units[each.unit].trainable)
        return sum(each.working.nbytes for each in copied)

    @property
    def peak_bytes(self) -> Mapping[TierKind, int]:
        """Tier → bytes of the plan. Activations and working memory come on top."""
        return self.plan.peak_nbytes()

    def chrome_trace(self) -> dict[str, Any]:
        """Return the last step as a Chrome trace."""
        start, end = self.steps[-2].time, self.steps[-1].time
        nbytes = {tier: held + self.activations.get(tier, 0) for tier, held in self.plan.nbytes().items()}
        samples = [Sample(time, nbytes) for time in (start, end)]
        waited = {lane: seconds for lane, seconds in self.exposed.items() if lane != "compute"}
        return chrome_trace(self.records, [StepSpan(start, end, waited)], samples, name="simulated rank 0")


def simulate(
    model: nn.Module,
    config: Config,
    links: Links,
    *,
    batch: Sequence[Any] | Mapping[str, Any],
    device: DeviceFacts | None = None,
    ranks: Ranks | None = None,
    steps: int = 3,
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    train_batch: bool = False,
    times: Times | None = None,
    free_nvme: int = 1 << 62,
) -> Simulation:
    """Train `model` for `steps` steps in virtual time, and return the last one.

    model: on the meta device; it cannot be used afterwards. links: bandwidths of a node; `collective` and copies are
    those of one rank. batch: arguments of the model for one micro-batch, positional ones or a mapping of keyword
    arguments; tensors are moved to the meta device. loss_of: returns the loss from the model's output; by default the
    output, its `loss` or its first item. steps: at least 3, since the first records the trace and the second is the
    first to follow it. train_batch: each step is a call of `engine.train_batch` with `blocks`, the `nn.ModuleList` with
    the most parameters. times: of operations and kernels on the host, if that is the device; by default they follow
    from `links`. free_nvme: bytes for a rank's states; by default as many as it needs.

    Raises what `infinity.initialize` raises, and RuntimeError for operations whose results depend on values.
    """
    _separate_tiles(model)
    facts, ranks = device or DeviceFacts(), ranks or Ranks()
    dram = inf if links.dram is None else links.dram / links.memory
    clock = Clock(links.wakeup_latency, facts.processors, dram)
    if ranks.size > 1 and links.collective is None:
        raise ConfigError(
            f"the bandwidths have no collective, which {ranks.size} ranks need: measure it with infinity bench-links "
            "under torchrun, on at least 2 ranks, or add the bytes/s"
        )
    place = _device(clock, facts, links, ranks, times)
    compute = Compute(clock, place, links)
    primitives = VirtualPrimitives(clock, lambda: Compute(clock, place, links))
    args = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    args = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), args)
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices=()))
        undo.enter_context(_no_automatic_collection())
        undo.enter_context(concurrency.using(primitives))
        undo.callback(clock.abort)
        platform = SimulatedPlatform(clock, place, compute, links, ranks, free_nvme)
        client = ClientOptimizer.of_config(config, model)
        if client is None:
            engine = TrainingEngine(model, config, device=place, platform=platform)
        else:
            own = client.configure(config)
            engine = TrainingEngine(model, own, client.groups, device=place, platform=platform, rules=client.rules)
        try:
            loop = _Loop(clock, place, compute, engine, loss_of or _loss_of)
            loop.run(args, steps, blocks=largest_list(model) if train_batch else None)
            simulation = _result(clock, engine.parts.plan, loop, platform.room)
            engine.close()
        except BaseException:
            engine._finalizer.detach()  # its threads are about to be ended
            raise
    return simulation


class _Loop:
    """A training loop, and its measurements."""

    def __init__(
        self,
        clock: Clock,
        device: SimulatedDevice,
        compute: Compute,
        engine: TrainingEngine,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> None:
        self.activation_bytes = self.working_bytes = 0
        self.flops = 0.0
        self.moved: dict[str, int] = {}
        """Bytes of saved activations read and written in the last step, by field of `Simulation`."""
        self.waits: dict[str, Waited] = {}
        self.steps: list[Boundary] = []
        self._clock, self._device, self._compute, self._engine = clock, device, compute, engine
        self._loss_of = loss_of

    def run(self, args: Any, steps: int, *, blocks: Sequence[nn.Module] | None) -> None:
        place = AsOnHost() if self._device.host_addressable else nullcontext()
        with fused_attention(), place, self._compute:
            self._note()
            for _ in range(steps):
                self.activation_bytes = self._compute.bytes.peak = 0
                self._compute.flops = 0.0
                before, moved, waits = self._compute.bytes.live, self._moved(), self._engine.ledger.waits()
                if blocks is not None:
                    self._whole_step(args, blocks)
                else:
                    for _ in range(self._engine.batch.accumulation):
                        self._micro_batch(args)
                self.working_bytes, self.flops = self._compute.bytes.peak - before, self._compute.flops
                self.moved = {key: nbytes - moved[key] for key, nbytes in self._moved().items()}
                self.waits = between(waits, self._engine.ledger.waits())
                self._note()

    def _moved(self) -> dict[str, int]:
        counters = self._engine.parts.counters()
        return {key: counters[key] for key in ("activation_bytes_read", "activation_bytes_written")}

    @property
    def ordinary(self) -> str:
        return self._engine._batches.reason

    def _micro_batch(self, args: Any) -> None:
        before = self._compute.bytes.live
        loss = self._loss_of(call(self._engine, args))
        self.activation_bytes = max(self.activation_bytes, self._compute.bytes.live - before)
        self._engine.backward(loss)
        del loss
        self._engine.step()

    def _whole_step(self, args: Any, blocks: Sequence[nn.Module]) -> None:
        before = self._compute.bytes.live

        def loss_of(output: Any, _: Any) -> torch.Tensor:
            loss = self._loss_of(output)
            self.activation_bytes = max(self.activation_bytes, self._compute.bytes.live - before)
            return loss

        self._engine.train_batch(repeat(args), loss_of, blocks=blocks)

    def _note(self) -> None:
        gc.collect()
        self._clock.turn()
        self.steps.append(Boundary(*self._device.position(), len(self._clock.submitted)))


def largest_list(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the `nn.ModuleList` with the most parameters. Raises ModelError if there is none."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no nn.ModuleList of blocks for engine.train_batch")
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


@contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the block: finalizers poll transfers, which lets other threads run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _separate_tiles(model: nn.Module) -> None:
    """Give each tile parameters of its own. On the meta device, tiles of `infinity.nn.tile` share their layer's version
    counter, so the update of one tile would count as an edit of all."""
    for tile in model.modules():
        if isinstance(tile, (LinearTile, ExpertsTile)):
            for name, parameter in tile.named_parameters(recurse=False):
                own = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                own.__dict__.update(vars(parameter))
                setattr(tile, name, own)


def _device(clock: Clock, facts: DeviceFacts, links: Links, ranks: Ranks, times: Times | None) -> SimulatedDevice:
    memory = links.memory / ranks.per_node
    if facts.host_addressable:
        return SimulatedHost(clock, facts, memory, times, links.unit_overhead)
    if links.host_to_device is None or links.device_to_host is None:
        raise ConfigError(
            "the bandwidths lack host_to_device or device_to_host, which a plan with GPUs needs: measure them with "
            "infinity bench-links on a machine with such a GPU, or add the bytes/s"
        )
    copies = links.host_to_device, links.device_to_host
    overheads = {"launch": links.launch_overhead, "unit_overhead": links.unit_overhead}
    return SimulatedAccelerator(clock, facts, memory, *copies, **overheads)


def _result(clock: Clock, plan: Plan, loop: _Loop, room: SimulatedRoom | None) -> Simulation:
    start, end = loop.steps[-2:]
    waited = exposed(clock.records, start, end)
    moved: dict[str, int] = {}
    order: dict[str, list[tuple[str, int]]] = {}
    for record in clock.submitted[start.submitted : end.submitted]:
        moved[record.lane] = moved.get(record.lane, 0) + record.nbytes
        order.setdefault(record.lane, []).append((record.name, record.nbytes))
    seconds = end.time - start.time
    return Simulation(
        seconds=seconds,
        compute_seconds=seconds - sum(waited.values()),
        exposed=waited,
        moved=moved,
        order=order,
        flops=loop.flops,
        activation_bytes=loop.activation_bytes,
        working_bytes=loop.working_bytes,
        activations={} if room is None else {room.kind: room.peak},
        **loop.moved,
        waits=loop.waits,
        ordinary=loop.ordinary,
        plan=plan,
        steps=loop.steps,
        records=clock.records,
        submitted=clock.submitted,
    )


def _loss_of(output: Any) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    return output[0] if loss is None else loss

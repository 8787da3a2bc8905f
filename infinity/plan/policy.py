"""Translates a config into tiers and formats of states, and the update schedule. Pure.

ZeRO stages (Rajbhandari et al. 2020) say which states are sharded and which are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from infinity.errors import ModelError
from infinity.plan.formats import GradDtypes, MasterFormat, StateFormat, grad_dtypes, state_format
from infinity.plan.frozen import FrozenFormat
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement, Policy, State
from infinity.plan.windows import RecordsFormat
from infinity.rules import MomentFormat, RuleName
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Sharding:
    """True for each kind of state that is sharded over ranks: optimizer states, accumulated gradients, parameters.

    Replicated states are in device memory: parameters stay there from step to step, gradients from the first
    micro-batch of a step to the last.
    """

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of(cls, stage: Stage) -> Sharding:
        """Stage 0: plain data parallelism. 1: optimizer states are sharded. 2: gradients too. 3: parameters too."""
        return cls(stage >= 1, stage >= 2, stage >= 3)


UpdatedIn = Literal["buffer", "tier", "staging"]
"""Memory in which parameters are updated: the unit's buffer on the device; their extent in host memory, which is copied
to the buffer afterwards, if the unit stays there; or a host buffer that is copied from and to both.
"""

UpdateSchedule = Literal["during_backward", "next_forward", "after_backward"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a dtype in the config → dtype."""


@dataclass(frozen=True)
class RankInfo:
    """The data-parallel ranks, as far as a plan depends on them."""

    size: int = 1
    shards: int = 1
    """Number of shards of a unit: `size` or 1."""
    backend: str = ""
    """Backend of torch.distributed; empty if nothing is exchanged, since there is no process group."""
    model_parallel: int = 1
    """Number of ranks that hold one replica of the model together (tensor parallelism)."""

    @property
    def exchanged(self) -> bool:
        """Return whether gradients are reduced over ranks. A sum over a trainer's group of one needs no dtype of its
        own.
        """
        return bool(self.backend) and self.size > 1


@dataclass(frozen=True)
class DeviceInfo:
    """The device that the model computes on, as far as a plan depends on it."""

    type: str = "cpu"
    """Type of the torch device, such as "cpu" or "cuda"."""
    host_addressable: bool = True
    """True if the host's I/O and optimizer kernels can work in the device's buffers."""
    nbytes: int = 0
    """Bytes of the device's own memory; 0 if it computes in the host's."""
    processors: int = 0
    """Number of the host's processors for updates; 0: all that the process may use."""
    limit: int = 0
    """Bytes of the device's memory that may be used (`infinity.memory.device`); 0: all."""
    updates: bool = True
    """True if the device's kernels update states with the host's bits."""

    @property
    def usable(self) -> int:
        """Bytes that sizes are derived from; 0: they depend on the model only."""
        return min(self.nbytes, self.limit) if self.nbytes and self.limit else self.nbytes or self.limit


@dataclass(frozen=True)
class GradFormat:
    """Dtypes of gradients by the dtype of their parameters; arguments as of `grad_dtypes`."""

    communication: torch.dtype | None
    accumulation: torch.dtype
    summed: bool
    exchanged: bool
    whole: bool

    def __call__(self, own: torch.dtype) -> GradDtypes:
        return grad_dtypes(
            own,
            communication=self.communication,
            accumulation=self.accumulation,
            summed=self.summed,
            exchanged=self.exchanged,
            whole=self.whole,
        )


@dataclass(frozen=True)
class OptimizerFormat:
    """Format of the optimizer states of a unit; arguments as of `state_format`, for units of native rules."""

    master: MasterFormat
    rule: RuleName
    moments: MomentFormat

    def __call__(self, layout: UnitLayout) -> StateFormat | RecordsFormat:
        if layout.windows:
            return RecordsFormat(layout)
        return state_format(layout.dtype, self.master, self.rule, self.moments)


def update_schedule(config: Config) -> UpdateSchedule:
    """Return the update schedule. `auto` is "next_forward" with clipping or a loss scale, which need the norm of all
    gradients before the first update; otherwise "during_backward".
    """
    if config.infinity.update == "auto":
        global_first = config.gradient_clipping > 0 or config.scales_loss
        return "next_forward" if global_first else "during_backward"
    return config.infinity.update


def speculates(config: Config) -> bool:
    """Return whether updates that need the norm of all gradients may be drafts (`infinity.speculate`)."""
    waits = config.infinity.update == "auto" and update_schedule(config) == "next_forward"
    return waits and config.infinity.speculate == "auto"


def frozen_format(config: Config) -> FrozenFormat | None:
    """Return the code of frozen parameters; None: they are stored as they are."""
    return None if config.infinity.frozen == "as_is" else config.infinity.frozen


def updated_in_forward(layouts: Sequence[UnitLayout], share: float) -> frozenset[int]:
    """Return the trained units whose update is left to the next forward: about `share` of the elements, spread evenly.

    Each follows the elements that it stands for, so that the first units, which the next forward needs at once, are
    updated as backward ends.
    """
    chosen, due = set(), 0.0
    for layout in layouts:
        if layout.trainable:
            due += share * layout.numel
            if due >= layout.numel:
                due -= layout.numel
                chosen.add(layout.index)
    return frozenset(chosen)


def policy(config: Config, accumulation: int, ranks: RankInfo, device: DeviceInfo) -> Policy:
    """Return the tier and format of each state. Gradients are stored in the tier of the optimizer states.

    accumulation: micro-batches per step, as far as it is known when the engine is constructed.
    """
    zero = config.zero_optimization
    sharding = Sharding.of(zero.stage)
    param_tier, optim_tier = (TierKind.of_config(x.device) for x in (zero.offload_param, zero.offload_optimizer))
    # Buffers keep the parameters on the device, so their tier can be that of the optimizer states. An update then
    # copies them once, to the buffer [Note: parameters below stage 3].
    if not sharding.params and optim_tier.in_host_memory and not device.host_addressable:
        param_tier = optim_tier
    summed = accumulation > 1 or not config.managed_gradient_accumulation or config.infinity.accumulation_buffers
    whole = not sharding.grads and summed
    return Policy(
        param_tier=param_tier,
        optim_tier=optim_tier,
        grad_tier=optim_tier,
        grads=GradFormat(
            communication=_communication(config, ranks),
            accumulation=DTYPES[config.data_types.grad_accum_dtype],
            summed=summed,
            exchanged=ranks.exchanged,
            whole=whole,
        ),
        states=OptimizerFormat(config.infinity.master, config.optimizer.rule, config.infinity.moments),
        grads_pass=_consumed_on_arrival(config, accumulation, whole),
        tile_size=None if config.infinity.tile_size == "auto" else config.infinity.tile_size,
        resident=not sharding.params,
        grads_whole=whole,
    )


def updated_in(placement: Placement, unit: int, *, host_addressable: bool) -> UpdatedIn:
    """Return the memory in which a unit's parameters are updated.

    host_addressable: the host's kernels can work in the device's buffers.
    """
    if placement.of(unit, State.OPTIM).tier.on_device:
        return "buffer"
    if placement.of(unit, State.PARAM).tier.in_host_memory:
        return "tier"
    return "buffer" if host_addressable else "staging"


def used_in_place(placement: Placement, ranks: RankInfo, device: DeviceInfo) -> frozenset[int]:
    """Return the units that inference uses where they are stored, without a buffer: whole ones, in memory in which the
    model computes [Note: units in place].
    """
    if ranks.shards > 1 or not device.host_addressable:
        return frozenset()
    return frozenset(
        unit
        for (unit, state), extent in placement.extents.items()
        if state is State.PARAM and extent.tier.in_memory and extent.code is None
    )


def written_late(
    layouts: Sequence[UnitLayout], placement: Placement, rules: Policy, device: DeviceInfo
) -> frozenset[int]:
    """Return the units whose updates leave the parameters in the unit's buffer. They are written to their tier as the
    unit leaves the buffer, and not with each update [Note: write-back].
    """
    # An edit of 16-bit parameters is found by comparison with the tier, which must have the last update's.
    return frozenset(
        layout.index
        for layout in layouts
        if rules.resident
        and layout.trainable
        and layout.dtype == torch.float32
        and updated_in(placement, layout.index, host_addressable=device.host_addressable) == "buffer"
    )


def holds_sums(config: Config, policy: Policy, layouts: Sequence[UnitLayout]) -> bool:
    """Return whether the gradients of any number of micro-batches add up in `data_types.grad_accum_dtype` or in fp32.

    layouts: of trained units.
    """
    kept = DTYPES[config.data_types.grad_accum_dtype], torch.float32
    dtypes = [policy.grads(layout.dtype) for layout in layouts]
    return all((each.collected if policy.grads_whole else each.stored) in kept for each in dtypes)


def _consumed_on_arrival(config: Config, accumulation: int, whole: bool) -> bool:
    """Return whether the update consumes gradients as they arrive. Those of several micro-batches add up in their
    tier, unless they add up in device buffers (`whole`).
    """
    if not config.managed_gradient_accumulation or update_schedule(config) != "during_backward":
        return False
    return whole or (accumulation == 1 and not config.infinity.accumulation_buffers)


def _communication(config: Config, ranks: RankInfo) -> torch.dtype | None:
    """Return the dtype of the sum of gradients over ranks; None: their own dtype."""
    if config.communication_data_type is not None:
        return DTYPES[config.communication_data_type]
    return torch.float32 if ranks.backend == "gloo" else None


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of all floating parameters in training; None: their present dtypes."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def trained_dtype(name: str, dtype: torch.dtype, wanted: torch.dtype | None, *, trainable: bool) -> torch.dtype:
    """Return the dtype of a unit in an engine. name: its first parameter. wanted: `compute_dtype`.

    Raises ModelError for dtypes that cannot be trained.
    """
    if not dtype.is_floating_point:
        if trainable:
            raise ModelError(f"{name} is {dtype}, which no optimizer here trains: convert it to fp32, or freeze it")
        return dtype
    if trainable and dtype.itemsize < 2:
        raise ModelError(
            f"{name} is {str(dtype).removeprefix('torch.')} and requires a gradient: freeze it "
            "(requires_grad_(False)), or convert it, with its scales, to 16 bits"
        )
    if wanted is not None:
        return wanted
    if trainable and dtype != torch.float32:
        raise ModelError(
            f'{name} is {str(dtype).removeprefix("torch.")}, which is trained only with "bf16" or '
            '"fp16": {"enabled": true}. Set one, or give the model fp32 parameters.'
        )
    return dtype

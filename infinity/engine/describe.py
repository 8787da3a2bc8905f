"""Prints a plan: units and the tier of each state, and the bytes of each tier."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from infinity.inputs import show
from infinity.plan.formats import MASTERS, StateFormat
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.sizes import counted, show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.available import memory_limit
from infinity.tiers.headroom import dtype_option, plan_command, room

if TYPE_CHECKING:
    from infinity.config import Config

_HEAD = ("unit", "parameters", "dtype", "param", "gradient", "optimizer")
_KINDS = {State.PARAM: "params", State.GRAD: "gradients", State.OPTIM: "optimizer"}
_PLURALS = {State.PARAM: "parameters", State.GRAD: "gradients", State.OPTIM: "optimizer states"}
_PLACES = {TierKind.DEVICE: "on the device", TierKind.HOST: "in host memory", TierKind.NVME: "on nvme"}
_WHEN = {
    "during_backward": "during backward",
    "after_backward": "after backward",
    "next_forward": "in the next forward",
}
_LITTLE = 2 << 30
"""Bytes of memory below which a user hears what a limit leaves."""
_ON_ARRIVAL, _NOWHERE = "on arrival", "-"
_TINY = 64 << 20
"""Bytes of a plain loop below which the least sizes of buffers can exceed all savings."""
_BLOCK = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<number>\d+)(?:\.(?P<inner>.+))?$")
"""Path of a unit in a repeated block: `model.layers.` 0 `mlp`."""


def describe(plan: Plan) -> str:
    """Return a table of units and their states, and the bytes in each tier. Equal consecutive blocks share a line.

    The cells of states have the tier and the bytes of this rank's part. Two cells have neither:
    "-"             a frozen unit has no gradient and no optimizer states
    "on arrival"    backward passes the gradient to the update. Its tier stores it only while the update has to wait, as
                    in the first step. Its memory or space is listed separately; the totals include it on a device
                    where a budget holds the unit's states.
    """
    rows = [_HEAD, *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", summarize(plan)])


def summarize(plan: Plan) -> str:
    """Return the lines below the table: units, parameters and update, and the bytes in each memory."""
    total = sum(layout.parameter_numel for layout in plan.units)
    ranks = f", stage {plan.stage} over {plan.ranks.size} ranks" if plan.ranks.size > 1 else ""
    if plan.ranks.model_parallel > 1:
        ranks = f", tensor parallel over {plan.ranks.model_parallel} ranks{ranks}"
    purpose = f"update {_WHEN[plan.update]}" if plan.update else "for inference"
    if plan.drafted_share == 1.0:
        purpose = "update during backward"
    elif plan.drafted:
        purpose += f", of {counted(len(plan.drafted), 'unit')} during backward"
    if plan.in_forward:
        purpose += f", of {counted(len(plan.in_forward), 'unit')} in the next forward"
    if plan.in_place:
        purpose += f", {counted(len(plan.in_place), 'unit')} in place"
    if plan.drafted:
        purpose += "; if clipping or a loss scale changes the gradients, updates during backward are repeated"
    meanwhile = "".join(
        f"; in the first steps, stored gradients take up to {show_bytes(more)} more {_where(plan, tier)}"
        for tier, more in plan.passing.items()
    )
    if plan.step_nbytes:
        where = _where(plan, TierKind.DEVICE)
        meanwhile += f"; up to {show_bytes(plan.step_nbytes)} more {where} while the optimizer updates a parameter"
    return "\n".join(
        [
            f"{counted(len(plan.units), 'unit')}, {total:,} parameters{ranks}; {purpose}",
            f"this rank holds {', '.join(_held(plan))}{meanwhile}",
            *plain_loop(plan),
            *_activations(plan),
            *_stripe(plan),
            *_durable(plan),
            *_drafts(plan),
        ]
    )


def left_under_limit(plan: Plan) -> Iterator[str]:
    """Yield what a container or a ulimit leaves for activations, if that is little and they are in host memory."""
    name, _ = memory_limit()
    least, most = room()
    if name and plan.device.host_addressable and least < _LITTLE:
        left = show_bytes(least)
        if show_bytes(most) != left:
            left += f" (or {show_bytes(most)}, if it does not count pages of library files)"
        yield (
            f"{name} leaves about {left}, into which activations and backward's gradients have to fit: "
            f"{plan_command(dtype_option(plan))} predicts them"
        )


def kept(config: Config, plan: Plan, ranks: int = 1) -> Iterator[str]:
    """Yield each key that keeps states in a faster tier than `offload_*` names, with the bytes of `ranks` ranks."""
    found: dict[tuple[str, TierKind, TierKind], dict[State, int]] = {}
    for (_, state), extent in plan.placement.extents.items():
        named = plan.policy.tier_of(state)
        if extent.tier != named and extent.nbytes:
            kinds = found.setdefault((_keeper(config, extent.tier, state), extent.tier, named), {})
            kinds[state] = kinds.get(state, 0) + extent.nbytes * ranks
    if plan.cached_bytes and (key := _source_of(config, "infinity.cache_bytes")):
        where = _PLACES[TierKind.HOST if plan.device.type == "cpu" else TierKind.DEVICE]
        held = min(plan.cached_bytes, sum(layout.nbytes for layout in plan.units))
        nbytes = show_bytes(held * ranks)
        yield f"{key} keeps up to {nbytes} of parameters in buffers {where}; infinity.cache_bytes 0 keeps none"
    for (key, tier, named), kinds in found.items():
        parts = [f"{show_bytes(nbytes)} of {_PLURALS[state]}" for state, nbytes in kinds.items()]
        listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        yield f"{key} keeps {listed} {_PLACES[tier]} instead of {_PLACES[named]}"


def _keeper(config: Config, tier: TierKind, state: State) -> str:
    """Return the key that keeps a state in `tier`, with its value, as the user wrote it."""
    memory = config.infinity.memory
    if tier.on_device:
        name = next(
            (key for key in ("device_optimizer", "device_states") if getattr(memory, key) is not None), "device"
        )
    else:
        name = "host_params" if state is State.PARAM and memory.host_params is not None else "host"
    dotted = f"infinity.memory.{name}"
    if source := _source_of(config, dotted):
        return source
    value = getattr(memory, name)
    in_bytes = name in ("host", "device", "device_states") and isinstance(value, int)
    return f"{dotted} {show_bytes(value) if in_bytes else show(value)}"


def _source_of(config: Config, dotted: str) -> str:
    """Return the key of DeepSpeed, with its value, that sets `dotted`; empty if none does."""
    mapped = (phrase.partition(" → ") for phrase in config.notes.mapped)
    return next((source for source, _, target in mapped if target.startswith(f"{dotted} ")), "")


def plain_loop(plan: Plan, beside: int | None = None) -> Iterator[str]:
    """Yield the bytes of states that a loop without an engine holds on every rank: parameters, gradients, fp32 masters
    of 16-bit parameters, and fp32 moments. Rules in Python have states of their own, which are not known here.

    beside: bytes of activations and processes in addition; None: they are not known.
    """
    nbytes, states = 0, "optimizer states" if plan.update is not None else ""
    is_half = False
    for layout in plan.units:
        if layout.windows:
            return
        form = plan.policy.states(layout) if layout.trainable and plan.update is not None else None
        each = layout.dtype.itemsize
        if isinstance(form, StateFormat):
            moments = sum(kind.per == 1 and kind.name not in MASTERS for kind in form.states)
            each = 2 * torch.float32.itemsize + moments * torch.float32.itemsize
            is_half |= layout.dtype.itemsize < torch.float32.itemsize
            if any(kind.name == "momentum_buffer" for kind in form.states):
                states = "momentum"  # a loop that sets none holds none
        nbytes += layout.parameter_numel * each
    held = f"parameters, gradients and {states}" if states else "parameters"
    if is_half:
        held += ", in fp32 or in 16 bits with fp32 masters,"
    ours = sum(of_tier for tier, of_tier in plan.nbytes().items() if tier.in_memory)
    why = "; buffers have a least size, so a model as small as this saves none" if nbytes < min(ours, _TINY) else ""
    total = ""
    if beside is not None:
        total = f", and at least {show_bytes(nbytes + beside)} with the activations and processes of this table"
    yield f"a plain PyTorch loop holds {show_bytes(nbytes)} of {held} in memory{total}{why}"


def _held(plan: Plan) -> Iterator[str]:
    """Yield the bytes of each memory; of device and host, those of each kind, in the words of `infinity plan`."""
    held: dict[str, int] = {}
    kinds: dict[str, dict[str, int]] = {}
    for tier, nbytes in plan.nbytes().items():
        where = _where(plan, tier)
        held[where] = held.get(where, 0) + nbytes
        kinds[where] = dict.fromkeys((*_KINDS.values(), "buffers"), 0)
    for extents in (plan.placement.extents, plan.placement.spares):
        for (_, state), extent in extents.items():
            if state is not State.GRAD or not plan.policy.passes(extent.tier):  # those are in `plan.passing`
                kinds[_where(plan, extent.tier)][_KINDS[state]] += extent.nbytes
    for pool in plan.pools:
        kinds[_where(plan, pool.tier)]["buffers"] += pool.nbytes
    for where, nbytes in held.items():
        parts = {kind: part for kind, part in kinds[where].items() if part and where != f"on {TierKind.NVME}"}
        listed = ", ".join(f"{show_bytes(part)} {kind}" for kind, part in parts.items())
        yield f"{show_bytes(nbytes)} {where}" + (
            f" ({listed if len(parts) > 1 else next(iter(parts))})" if parts else ""
        )


def _where(plan: Plan, tier: TierKind) -> str:
    """Return the memory of a tier. The device's is the host's if the host computes."""
    if plan.device.type == "cpu" and tier.in_memory:
        return "in host memory"
    return f"on {tier}"


def _activations(plan: Plan) -> Iterator[str]:
    if (moved := plan.activations) is not None:
        yield f"tensors saved for backward, from {show_bytes(moved.min_bytes)}: on {moved.tier}, beside these bytes"


def _stripe(plan: Plan) -> Iterator[str]:
    if plan.io is not None and len({*(weights := plan.io.stripe.weights)}) > 1:
        shares = (f"{weight / sum(weights):.0%} in {f}" for weight, f in zip(weights, plan.io.folders, strict=True))
        yield f"shares of nvme: {', '.join(shares)}"


def _durable(plan: Plan) -> Iterator[str]:
    if plan.io is not None and (durable := plan.io.durable) is not None:
        folders = ", ".join(str(folder / durable.run) for folder in plan.io.folders)
        yield f"durable run {durable.run}: two slots of each state in {folders}, {show_bytes(durable.slot_nbytes)}"


def _drafts(plan: Plan) -> Iterator[str]:
    if plan.drafted:
        slots = plan.placement.spares.values()
        sizes = [(sum(slot.nbytes for slot in slots if slot.tier is tier), tier) for tier in TierKind]
        held = ", ".join(f"{show_bytes(nbytes)} on {tier}" for nbytes, tier in sizes if nbytes)
        if held:
            yield f"to repeat an update, second slots of the states take {held} (infinity.speculate)"


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield (name, cells) of each block. Blocks are alike if their units have the same names inside and equal rows."""
    blocks = []
    for (before, number), members in groupby(map(_Named.of, plan.units), key=lambda unit: (unit.before, unit.number)):
        units = list(members)
        rows = tuple(_cells(plan, [unit.layout for unit in units]))
        blocks.append((number, (before, tuple(unit.inner for unit in units), rows)))
    for (before, _, rows), alike in groupby(blocks, key=lambda block: block[1]):
        numbers = [number for number, _ in alike]
        name = before + numbers[0]
        if len(numbers) > 1:
            name += f" … {numbers[-1]}"
        for count, *cells in rows:
            notes = [f"{len(numbers)} alike"] if len(numbers) > 1 else []
            if count != "1":
                notes.append(f"{count} units each" if notes else f"{count} units")
            yield f"{name} ({', '.join(notes)})" if notes else name, *cells


class _Named(NamedTuple):
    """A unit, with its path before the number of its block, the number, and the path inside of the block."""

    layout: UnitLayout
    before: str
    number: str
    inner: str

    @classmethod
    def of(cls, layout: UnitLayout) -> _Named:
        """Split the name; a unit outside of blocks has no number."""
        match = _BLOCK.match(layout.name.partition(" (")[0])
        if match is None:
            return cls(layout, layout.name, "", "")
        return cls(layout, match["before"], match["number"], match["inner"] or "")


def _cells(plan: Plan, layouts: Sequence[UnitLayout]) -> Iterator[tuple[str, ...]]:
    """Yield (number of units, cells) of a block, one row for each dtype and tiers of units in it."""
    alike: dict[tuple[str, ...], list[UnitLayout]] = {}
    for layout in layouts:
        dtype = str(layout.dtype).removeprefix("torch.")
        places = (_tier(plan, layout, state) for state in State)
        if not layout.trainable:
            dtype += ", frozen" if layout.code is None else f", frozen in {layout.code.format}"
        alike.setdefault((dtype, *places), []).append(layout)
    for (dtype, *tiers), members in alike.items():
        cells = [f"{sum(layout.parameter_numel for layout in members):,}", dtype]
        for state, tier in zip(State, tiers, strict=True):
            stored = tier not in (_ON_ARRIVAL, _NOWHERE)
            nbytes = sum(plan.placement.of(layout.index, state).nbytes for layout in members) if stored else 0
            cells.append(f"{tier} {show_bytes(nbytes)}" if stored else tier)
        yield str(len(members)), *cells


def _tier(plan: Plan, layout: UnitLayout, state: State) -> str:
    """Return the tier of a unit's state, or a word for a state whose extent is rarely used or does not exist."""
    if state is State.GRAD and layout.trainable and plan.update is not None and plan.policy.grads_pass:
        return _ON_ARRIVAL
    held = plan.placement.holds(layout.index, state)
    return plan.placement.of(layout.index, state).tier if held else _NOWHERE

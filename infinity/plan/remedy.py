"""Changes of a config with which a plan fits the memory that it exceeds. Each is planned before it is advised. Pure.

Keys of buffers are lowered in steps of a half. One key is preferred to several, and a large value to a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import InfinityError
from infinity.inputs import show
from infinity.plan.budget import Budget
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.plan.pools import READ_AHEAD, TILES
from infinity.plan.shortage import Shortage, keys_of_buffers
from infinity.sizes import format_size, show_bytes
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config

_LEAST_UNIT = 4096
"""Smallest value of infinity.unit_size that is tried."""
_LEAST_TILE = 4096
"""Elements of the smallest tile."""
_NOTCHES = 16
"""Most values of a key that are tried."""

Replan = Callable[["Config", Budget], Plan]
"""(config, budget) → the plan of the same model, ranks and device."""
Lacks = Callable[[Plan], Shortage | None]
"""Plan → the memory that it exceeds."""


@dataclass(frozen=True)
class Change:
    """A change of a run. text: words of an advice. keys: full name of a key of the config → its value in JSON; without
    changes outside of the config, such as of the script.
    """

    text: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    peak: int = 0
    """Bytes of a node that the run takes with it; 0: not known."""
    suffices: bool = True
    """False: the run does not fit with it either."""

    def __str__(self) -> str:
        return self.text

    def then(self, *others: Change, by: str = ", and ") -> Change:
        """Return all changes as one."""
        changes = [change for change in (self, *others) if change.text]
        return Change(
            by.join(change.text for change in changes), {k: v for each in changes for k, v in each.keys.items()}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object of the keys, to be merged into that of a config."""
        content: dict[str, Any] = {}
        for dotted, value in self.keys.items():
            *sections, name = dotted.split(".")
            section = content
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = value
        return content


@dataclass(frozen=True)
class Trial:
    """A config that is tried. done: other changes; changed: key of `infinity` → value."""

    config: Config
    budget: Budget
    plan: Plan
    done: Change = Change()
    changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def change(self) -> Change:
        values = {f"infinity.{name}": _shown(name, value) for name, value in self.changed.items()}
        texts = [f"{name} to {show(value)}" for name, value in values.items()]
        listed = " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)
        return self.done.then(Change(f"set {listed}" if listed else "", values), by=" and ")

    def __str__(self) -> str:
        return str(self.change)


def remedy(
    config: Config, plan: Plan, budget: Budget, short: Shortage, replan: Replan, lacks: Lacks, beside: int = 0
) -> str:
    """Return changes with which the plan fits, or the least bytes that any needs.

    plan: that of `config` and `budget`. short: what it lacks. beside: bytes that the process needs beside any plan.
    """
    raised = f"raise {_raised(plan, short)}, or " if short.key else ""
    if not short.tier.in_memory:
        return f'{raised}use fewer bytes per parameter (bf16, or infinity.moments "8bit"), or more ranks'
    tried = []
    for trial in trials(config, plan, budget, short, replan, lacks):
        if lacks(trial.plan) is None:
            return f"{raised}{trial}"
        tried.append(needed(trial.plan, short.tier))
    least = show_bytes(min([needed(plan, short.tier), *tried]) + beside)
    process = " with the process" if beside else ""
    return f"{raised}use a smaller model or more ranks: the smallest buffers need {least}{process}{_largest(plan)}"


def fitting(config: Config, plan: Plan, budget: Budget, short: Shortage, replan: Replan, lacks: Lacks) -> Trial | None:
    """Return the first change with which the plan fits; None if none does. Arguments: as of `remedy`."""
    found = trials(config, plan, budget, short, replan, lacks)
    return next((trial for trial in found if lacks(trial.plan) is None), None)


def _raised(plan: Plan, short: Shortage) -> str:
    """Return the key of a limit, with a value with which the plan fits if one is known."""
    if short.tier.on_device:
        return short.key  # sizes of buffers on the device follow from it
    each = " for each rank of a node" if plan.ranks.size > 1 else ""
    return f"{short.key} to {short.needed}{each}"


def trials(
    config: Config, plan: Plan, budget: Budget, short: Shortage, replan: Replan, lacks: Lacks
) -> Iterator[Trial]:
    """Yield planned changes, the best first: states in slower tiers, smaller buffers, both. Arguments: as of `remedy`.

    Buffers are as large as fits, or the smallest ones. Smaller buffers come first if states are fewer.
    """
    start = Trial(config, budget, plan)
    search = _Search(replan, lacks)
    moved = list(search.moved(start, short))
    tiers = [
        each for each in TierKind if each is short.tier or (short.tier.in_host_memory and plan.in_host_memory(each))
    ]
    states = sum(held.get(tier, 0) for held in (plan.placement.nbytes, plan.passing) for tier in tiers)
    if states >= sum(pool.nbytes for pool in plan.pools if pool.tier in tiers):
        yield from moved[:1]
    yield from search.smaller_buffers(start, short.tier)
    yield from moved
    for trial in moved:
        yield from search.smaller_buffers(trial, short.tier)


def needed(plan: Plan, tier: TierKind) -> int:
    """Return the bytes of host memory, or of the device, that the plan needs."""
    return plan.peak_of_host() if tier.in_host_memory else plan.peak_nbytes()[tier]


def _largest(plan: Plan) -> str:
    """Return advice on the largest parameter, if it is a matrix that sizes the buffers; else an empty text."""
    largest = max(plan.units, key=lambda layout: layout.nbytes)
    slot = max(largest.slots, key=lambda slot: slot.numel)
    if len(slot.shape) != 2 or 2 * slot.numel < largest.numel:
        return ""
    return (
        f". The largest parameter is {slot.name} ({show_bytes(slot.numel * largest.dtype.itemsize)}). If it is an "
        "nn.Linear's, split it with infinity.nn.tile, and set infinity.unit_size to no more than a tile"
    )


class _Search:
    """Plans changes of a config."""

    def __init__(self, replan: Replan, lacks: Lacks) -> None:
        self._replan, self._lacks = replan, lacks

    def fits(self, trial: Trial) -> bool:
        return self._lacks(trial.plan) is None

    def moved(self, start: Trial, short: Shortage) -> Iterator[Trial]:
        """Yield `start` with states in slower tiers: those of a budget, else those of `offload_*`."""
        found = _budget(start, short)
        if found is not None:
            done, budget = found
            yield from self._planned(replace(start, done=done, budget=budget))
        zero = start.config.zero_optimization
        host_computes = start.plan.device.host_addressable
        for device in ("nvme",) if short.tier.in_host_memory or host_computes else ("cpu", "nvme"):
            folders = (zero.durable_paths or (Path(),)) if device == "nvme" else None
            names = [] if start.plan.policy.tier_of(State.OPTIM) == device else ["offload_optimizer"]
            if zero.stage == 3 and start.plan.policy.tier_of(State.PARAM) != device:
                names.insert(0, "offload_param")
            if names:
                update = {"device": device, "nvme_path": folders}
                sections = {name: getattr(zero, name).model_copy(update=update) for name in names}
                config = start.config.model_copy(update={"zero_optimization": zero.model_copy(update=sections)})
                change = _offload(names, device, folders or ())
                yield from self._planned(replace(start, done=change, config=config))

    def smaller_buffers(self, start: Trial, tier: TierKind) -> Iterator[Trial]:
        """Yield `start` with one key lowered until it fits, or else with as few as possible, or else the smallest."""
        names = list(dict.fromkeys([*_keys(start.plan), "unit_size"]))
        least = start
        for name in names:
            for value in _VALUES[name](start.plan):
                for trial in self._set(start, name, value):
                    least = min(least, trial, key=lambda each: needed(each.plan, tier))
                    if self.fits(trial):
                        yield trial
                        return
        for trial in self._lowered(start, names):
            least = min(least, trial, key=lambda each: needed(each.plan, tier))
            if self.fits(trial):
                yield self._fewest(start, trial)
                return
        if least is not start:
            yield least

    def _planned(self, trial: Trial) -> Iterator[Trial]:
        """Yield `trial` with its plan; nothing if it has none, as where tiles would cut the blocks of 8-bit moments."""
        try:
            found = replace(trial, plan=self._replan(trial.config, trial.budget))
        except InfinityError:
            return
        yield found

    def _set(self, trial: Trial, name: str, value: int) -> Iterator[Trial]:
        section = trial.config.infinity.model_copy(update={name: value})
        config = trial.config.model_copy(update={"infinity": section})
        yield from self._planned(replace(trial, config=config, changed={**trial.changed, name: value}))

    def _lowered(self, start: Trial, names: list[str]) -> Iterator[Trial]:
        """Yield trials with the key of the most bytes lowered again and again, until no key is left."""
        values = {name: list(_VALUES[name](start.plan)) for name in names}
        trial = start
        while name := next((name for name in (*_keys(trial.plan), *names) if values.get(name)), None):
            for lower in self._set(trial, name, values[name].pop(0)):
                yield (trial := lower)

    def _fewest(self, start: Trial, found: Trial) -> Trial:
        """Return `found` without the changes that it does not need, and with the largest values of the others."""
        for name, lowered in list(found.changed.items()):
            original = getattr(start.config.infinity, name)
            for value in (original, *(value for value in _VALUES[name](start.plan) if value > lowered)):
                trial = next(self._set(found, name, value), found)
                if trial is not found and self.fits(trial):
                    kept = {key: each for key, each in trial.changed.items() if (key, each) != (name, original)}
                    found = replace(trial, changed=kept)
                    break
        return found


def _offload(names: Sequence[str], device: str, folders: Sequence[Path]) -> Change:
    """Return the change of sections `offload_*`. folders: of nvme."""
    keys: dict[str, Any] = {}
    for section in (f"zero_optimization.{name}" for name in names):
        keys[f"{section}.device"] = device
        if folders:
            keys[f"{section}.nvme_path"] = str(folders[0]) if len(folders) == 1 else [str(each) for each in folders]
    return Change(f"give {' and '.join(names)} the device {device} (zero_optimization)", keys)


def _budget(trial: Trial, short: Shortage) -> tuple[Change, Budget] | None:
    """Return (change, budget) without the states that a budget keeps in the tier; None if none keeps any there."""
    plan, budget = trial.plan, trial.budget
    extents = plan.placement.extents.items()
    tier = short.tier
    if all(plan.policy.tier_of(state) == tier for (_, state), extent in extents if extent.tier == tier):
        return None
    memory = "infinity.memory."
    if tier.on_device and budget.device_optimizer:
        text = "set infinity.memory.device_optimizer to 0, or lower it (DeepSpeed's offload_optimizer.ratio: raise it)"
        return Change(text, {f"{memory}device_optimizer": 0}), replace(budget, device_optimizer=0.0)
    if tier.on_device and budget.device_states is not None:
        text = "set infinity.memory.device_states to 0, or lower it"
        return Change(text, {f"{memory}device_states": 0}), replace(budget, device_states=0)
    if not tier.in_host_memory or short.key:
        return None
    if budget.host is not None:
        # The key is of a node, whose ranks share it.
        keys = {f"{memory}host": short.available} if plan.ranks.size == 1 else {}
        text = f"set infinity.memory.host to {short.available}" if keys else "lower infinity.memory.host"
        return Change(text, keys), replace(budget, host=short.available)
    key = f"{memory}host_params"
    mapped = (phrase.partition(" → ") for phrase in trial.config.notes.mapped)
    # DeepSpeed's key, if the config has it: both together are refused.
    written = next((source.split(" ")[0] for source, _, target in mapped if target.startswith(key)), key)
    return Change(f"set {written} to 0", {written: 0}), replace(budget, params=0)


def _keys(plan: Plan) -> Iterator[str]:
    """Yield the keys that size buffers in memory, of the most bytes first."""
    for keys, _ in keys_of_buffers(plan, (TierKind.DEVICE, TierKind.HOST)):
        for key in keys.split(" and "):
            name = key.removeprefix("infinity.")
            if name in _VALUES:
                yield name


def _halves(value: int, least: int) -> Iterator[int]:
    """Yield powers of two below `value`, descending, down to `least`."""
    power = 1 << max(0, (value - 1).bit_length() - 1)
    for _ in range(_NOTCHES):
        if power < least or not value:
            return
        yield power
        power //= 2


def _unit_sizes(plan: Plan) -> Iterator[int]:
    yield from _halves(max((layout.nbytes for layout in plan.units), default=0), _LEAST_UNIT)


def _prefetches(plan: Plan) -> Iterator[int]:
    largest = max((layout.nbytes for layout in plan.units), default=0)
    yield from _halves(plan.prefetch_bytes, largest)
    if plan.prefetch_bytes:
        yield 0


def _caches(plan: Plan) -> Iterator[int]:
    if plan.cached_bytes:
        yield 0


def _tiles(plan: Plan) -> Iterator[int]:
    sizes = (plan.placement.tile_sizes[layout.index] for layout in plan.units if layout.trainable)
    if plan.buffers(TILES):
        yield from _halves(max(sizes, default=0), _LEAST_TILE)


def _reads_ahead(plan: Plan) -> Iterator[int]:
    if nbytes := plan.buffer_bytes(READ_AHEAD):
        yield from _halves(nbytes, nbytes // 4)
        yield 0


_VALUES: Mapping[str, Callable[[Plan], Iterator[int]]] = {
    "prefetch_bytes": _prefetches,
    "cache_bytes": _caches,
    "unit_size": _unit_sizes,
    "tile_size": _tiles,
    "read_ahead_bytes": _reads_ahead,
}
"""Key → values below that of a plan, descending."""


def _shown(name: str, value: int) -> int | str:
    """Return the value in JSON: bytes have a unit, and a tile has elements."""
    return value if name == "tile_size" or not value else format_size(value)

"""Bytes that a plan takes of each memory of a node, and the smallest change with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from infinity.engine.budget import host_share
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.plan.remedy import Change, Trial, needed
from infinity.plan.shortage import Shortage, exceeded
from infinity.sim.machine import Machine
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.headroom import scarce

if TYPE_CHECKING:
    from infinity.config import Config

KINDS = ("params", "gradients", "optimizer", "second slots", "activations", "buffers", "processes")
_RESERVE = 0.05
"""Share of a predicted peak that is left on a CPU. With freed blocks of 1 MiB returned, 28 measured peaks were up to
3.3 % higher than predicted (bench/results/predict.md)."""
_WHOLE = 1.1
"""Share of the reserve that advice leaves: the changed run, predicted again, differs by some kB."""
_MANY = 4
"""Share of a peak, as a divisor, from which activations are worth naming."""
_KIND = {State.PARAM: "params", State.GRAD: "gradients", State.OPTIM: "optimizer"}


@dataclass(frozen=True)
class Needs:
    """Bytes of a node. Without GPUs, the device's bytes are those of host memory."""

    tiers: Mapping[TierKind, Mapping[str, int]]
    """Tier → kind → bytes: extents of states, activations and buffers."""
    peak: Mapping[TierKind, int]
    """Tier → the most bytes at once."""
    passing: Mapping[TierKind, int]
    """Tier → bytes of gradients, counted in `tiers` and `peak`, that are stored only in the first steps and in steps
    that depart from the trace."""
    available: Mapping[TierKind, int]
    ranks: int = 1
    """Ranks of a node."""
    constructed: int = 0
    """Bytes of parameters of a model that is constructed in host memory, of all ranks."""
    exceeded: Sequence[Shortage] = ()
    """Limits of `infinity.memory` that the plan of a rank exceeds, at which the engine would not start."""

    @property
    def lacking(self) -> list[TierKind]:
        """Return the tiers of which the machine has too little."""
        return [tier for tier in TierKind if self.peak[tier] > self.available[tier]]

    @property
    def limits(self) -> list[TierKind]:
        """Return the tiers of which the machine, or `infinity.memory`, gives too little."""
        over = {each.tier for each in self.exceeded}
        return [tier for tier in TierKind if tier in over or tier in self.lacking]

    @property
    def _on_cpu(self) -> bool:
        return not self.available[TierKind.DEVICE]

    @property
    def reserve(self) -> int:
        """Return the bytes by which a measured peak of host memory may exceed the prediction; 0 on nodes with GPUs."""
        return int(_RESERVE * self.peak[TierKind.HOST]) if self._on_cpu else 0

    @property
    def is_tight(self) -> bool:
        """Return whether host memory suffices for the prediction, but not for the reserve beside it."""
        return not self.limits and self.spare(TierKind.HOST) < self.reserve

    @property
    def returns_freed(self) -> bool:
        """Return whether a run returns freed blocks to the system, which lengthens its steps."""
        short = scarce(self.peak[TierKind.HOST], self.tiers[TierKind.HOST]["activations"])
        return self._on_cpu and not self.limits and self.spare(TierKind.HOST) < short

    def spare(self, tier: TierKind) -> int:
        return self.available[tier] - self.peak[tier]

    def lacking_at_start(self, freed: int = 0) -> int:
        """Return the bytes of host memory that a model in memory lacks beside the buffers; 0 or less: it fits.

        freed: bytes that a change frees.
        """
        activations = self.tiers[TierKind.HOST]["activations"]
        return self.constructed - activations - freed - self.spare(TierKind.HOST)

    def bound(self, tier: TierKind, *, reserve: float) -> int:
        """Return the largest peak that fits. reserve: share of the reserve of host memory that is left."""
        share = reserve * _RESERVE if tier.in_host_memory and self._on_cpu else 0
        return int(self.available[tier] / (1 + share))


def needs_of(
    plan: Plan,
    machine: Machine,
    *,
    activations: Mapping[TierKind, int],
    baseline_rss: int,
    registered: int = 0,
    constructed: int = 0,
) -> Needs:
    """Return the bytes that all ranks of a node take together.

    activations: tier → peak bytes of one rank that autograd saves, besides parameters. baseline_rss: resident bytes of
    a process without an engine. registered: bytes of the model's own buffers, which a rank has on its device.
    constructed: bytes of its parameters in memory.
    """
    ranks = machine.ranks_per_node
    place = {tier: TierKind.HOST if tier.on_device and not machine.gpus else tier for tier in TierKind}
    tiers = {tier: dict.fromkeys(KINDS, 0) for tier in TierKind}
    for (_, state), extent in plan.placement.extents.items():
        tiers[place[extent.tier]][_KIND[state]] += extent.nbytes * ranks
    for extent in plan.placement.spares.values():
        tiers[place[extent.tier]]["second slots"] += extent.nbytes * ranks
    if plan.io is not None and plan.io.durable is not None:
        for _, nbytes in plan.io.durable.added():
            tiers[TierKind.NVME]["second slots"] += nbytes * ranks
    for pool in plan.pools:
        tiers[place[pool.tier]]["buffers"] += pool.nbytes * ranks
    tiers[place[TierKind.DEVICE]]["buffers"] += plan.step_nbytes * ranks
    peak, passing = dict.fromkeys(TierKind, 0), dict.fromkeys(TierKind, 0)
    for tier, nbytes in plan.peak_nbytes().items():
        peak[place[tier]] += nbytes * ranks
        passing[place[tier]] += plan.passing.get(tier, 0) * ranks
    for tier, nbytes in activations.items():
        tiers[place[tier]]["activations"] += nbytes * ranks
        peak[place[tier]] += nbytes * ranks
    tiers[place[TierKind.DEVICE]]["buffers"] += registered * ranks
    peak[place[TierKind.DEVICE]] += registered * ranks
    tiers[TierKind.HOST]["processes"] += baseline_rss * ranks
    peak[TierKind.HOST] += baseline_rss * ranks
    available = {
        TierKind.DEVICE: machine.device_memory * machine.gpus,
        TierKind.HOST: machine.host_memory,
        TierKind.NVME: machine.nvme,
    }
    return Needs(tiers, peak, passing, available, ranks, constructed * ranks, tuple(exceeded(plan)))


@dataclass(frozen=True)
class Variant:
    """A changed run, and what is predicted of it."""

    change: Change
    """Without a text: the run as it is."""
    needs: Needs
    plan: Plan
    config: Config


@dataclass(frozen=True)
class Savings:
    """Changes that are left to make, each planned or simulated."""

    activations: Callable[[TierKind], Iterator[Variant]]
    """Memory that is lacking → changes of activations, the best first."""
    remedy: Callable[[Shortage], str]
    """Limit of `infinity.memory` that is exceeded → words of a change with which the plan fits it."""
    precision: Callable[[TierKind], Iterator[Variant]]
    """Memory that is lacking → changes to bf16, if the run is in fp32, the best first."""
    planned: Callable[[Variant, Shortage], Iterator[Trial]]
    """Change, memory of a rank that is still lacking → further changes, of states and buffers, the best first."""


def construction(start: Variant) -> Iterator[Change]:
    """Yield the change without which the run fits and its start, with a model in memory, does not."""
    needs = start.needs
    lacking = needs.lacking_at_start()
    if not needs.limits and lacking > 0:
        yield Change(f"{_construct(start)}, and {show_bytes(lacking)} of that do not fit")


def _construct(variant: Variant) -> Change:
    nbytes = show_bytes(variant.needs.constructed)
    return Change(
        f"construct the model {where_to_construct(variant.config)} (docs/large_models.md): in memory, its parameters "
        f"take {nbytes} until the engine has stored them"
    )


def where_to_construct(config: Config) -> str:
    """Return where a model is constructed without memory. `infinity.Init` needs a folder on nvme. On the meta device,
    torch's initialisers import its compiler, which takes 80 MB.
    """
    return "in infinity.Init" if config.zero_optimization.nvme_paths else "on the meta device"


def advice(start: Variant, savings: Savings) -> Iterator[Change]:
    """Yield, for each limit of `infinity.memory` and each tier that is exceeded, the bytes it lacks and the changes
    with which the plan would fit; and those that would leave the reserve.

    start: the run as it is.
    """
    needs = start.needs
    for over in needs.exceeded:
        lacking = show_bytes(over.needed - over.available)
        yield Change(f"{over.key} is {lacking} a rank too small: {savings.remedy(over)}")
    for tier in needs.lacking:
        change = _changes(start, tier, savings)
        yield replace(change, text=f"{memory_name(tier)} is {show_bytes(-needs.spare(tier))} too small: {change}")
    if needs.is_tight:
        # `construction` names a model in memory that does not fit beside the run as it is.
        search = _Search(TierKind.HOST, savings, [start], savings.activations(TierKind.HOST), constructs=False)
        if found := search.enough(reserve=_WHOLE):
            yield replace(found, text=f"to leave {show_bytes(needs.reserve)}, {found}")


def memory_name(tier: TierKind) -> str:
    return f"{tier} memory" if tier.in_memory else str(tier)


def kept_by_auto(plan: Plan, needs: Needs) -> int:
    """Return the bytes of a node's states on nvme that `infinity.memory.host: "auto"` keeps in host memory at most."""
    computes_on_host = plan.device.host_addressable
    held = needs.tiers[TierKind.HOST]
    filled = sum(nbytes for kind, nbytes in held.items() if kind != "activations")
    room = host_share(needs.available[TierKind.HOST], computes_on_host=computes_on_host) - filled
    states = sum(needs.tiers[TierKind.NVME][kind] for kind in _KIND.values())
    return max(0, min(room, needs.spare(TierKind.HOST), states))


def _changes(start: Variant, tier: TierKind, savings: Savings) -> Change:
    """Return changes with which the plan fits the tier; those that leave the reserve, if any do."""
    plan = start.plan
    if not tier.in_memory:
        native = [layout for layout in plan.units if layout.trainable and not layout.windows]
        is_small = not native or plan.policy.states(native[0]).bytes_per_element <= 5
        return Change("use a larger drive or more nodes" + ("" if is_small else ', or infinity.moments "8bit"'))
    searches = [
        _Search(tier, savings, [start], savings.activations(tier)),
        _Search(tier, savings, [], savings.precision(tier)),
    ]
    for search in searches:
        # Runs differ from predictions: a part of the reserve is better than none.
        for reserve in (_WHOLE, 0.5, 0):
            if found := search.enough(reserve=reserve):
                return found
    least = (each for search in searches for each in search.least())
    return min(least, key=lambda each: each.nbytes).to_change()


class _Least(NamedTuple):
    """Bytes of a memory that a run needs after a change, and those of them that are activations."""

    nbytes: int
    activations: int
    change: Change

    def to_change(self) -> Change:
        is_long = self.activations > self.nbytes // _MANY
        shorter = "shorter sequences, " if is_long else ""
        held = f", {show_bytes(self.activations)} of them for activations" if is_long else ""
        changed = f", if you {self.change}" if self.change.text else ""
        text = (
            f"no change suffices. Use {shorter}a smaller model, more nodes or more memory: {show_bytes(self.nbytes)}"
            f"{held}{changed}"
        )
        return replace(self.change, text=text, peak=self.nbytes, suffices=False)


class _Search:
    """Finds changes with which a plan fits a memory: of states and buffers, of activations, or one of each."""

    def __init__(
        self,
        tier: TierKind,
        savings: Savings,
        known: list[Variant],
        more: Iterator[Variant],
        *,
        constructs: bool = True,
    ) -> None:
        """known, more: runs that are tried, which `more` simulates. constructs: name a model in memory, too, that does
        not fit beside a change.
        """
        self._tier, self._savings, self._constructs = tier, savings, constructs
        self._known, self._more = known, more

    def enough(self, *, reserve: float) -> Change | None:
        """Return changes that suffice; None if none do. reserve: as of `Needs.bound`."""
        for variant in self._each():
            left = variant.needs.peak[self._tier] - variant.needs.bound(self._tier, reserve=reserve)
            if left <= 0:
                return replace(variant.change.then(self._construction(variant)), peak=variant.needs.peak[self._tier])
            for freed, change in self._planned(variant, left):
                if freed >= left:
                    changes = change.then(variant.change, self._construction(variant, freed))
                    return replace(changes, peak=variant.needs.peak[self._tier] - freed)
        return None

    def _construction(self, variant: Variant, freed: int = 0) -> Change:
        """Return the change of the model's construction that the others need beside them; no text if they need none."""
        lacking = variant.needs.lacking_at_start(freed if self._tier is TierKind.HOST else 0)
        return _construct(variant) if self._constructs and lacking > 0 else Change()

    def least(self) -> Iterator[_Least]:
        """Yield each run with all changes of states and buffers."""
        for variant in self._each():
            peak, activations = variant.needs.peak[self._tier], variant.needs.tiers[self._tier]["activations"]
            trials = self._planned(variant, peak)
            freed, change = max(trials, default=(0, Change()), key=lambda each: each[0])
            yield _Least(peak - freed, activations, change.then(variant.change, self._construction(variant, freed)))

    def _each(self) -> Iterator[Variant]:
        """Yield no change and those of activations, each of which is simulated once."""
        yield from self._known
        for variant in self._more:
            self._known.append(variant)
            yield variant

    def _planned(self, variant: Variant, lacking: int) -> Iterator[tuple[int, Change]]:
        """Yield (bytes of a node that it frees, change) of changes of states and buffers for `lacking` bytes."""
        before, ranks = needed(variant.plan, self._tier), variant.needs.ranks
        short = Shortage(self._tier, memory_name(self._tier), before, max(0, before - -(-lacking // ranks)))
        for trial in self._savings.planned(variant, short):
            yield (before - needed(trial.plan, self._tier)) * ranks, trial.change

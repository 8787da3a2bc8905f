"""Memory beside the plan, for units that `GatheredParameters` holds at once and the plan has no buffers for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from infinity.engine.base import BaseEngine
from infinity.errors import OutOfMemoryError
from infinity.observe.log import logger
from infinity.plan.pools import UNITS
from infinity.tier_kind import TierKind
from infinity.units.buffers import EXTRA
from infinity.units.unit import Unit

_LESS = (
    "gather fewer parameters at a time, or none, since a parameter is fetched where it is read (TRL: "
    "ds3_gather_for_generation=False)"
)


def make_room(engine: BaseEngine, units: Sequence[Unit]) -> Counter[int]:
    """Let the engine make the buffers that are missing to hold `units` at once, and return size → their number.

    Pass the result to `engine.parts.store.buffers.revoke`. Collective if more than `EXTRA` of a size are missing.
    Raises OutOfMemoryError on all ranks if they do not fit on one.
    """
    buffers = engine.parts.store.buffers
    sizes = buffers.missing(units)
    if max(sizes.values(), default=0) <= EXTRA:  # may be made at any time
        return Counter()
    needed = sum(size * count for size, count in sizes.items())
    check_room(engine, needed)
    if needed > engine.parts.most_gathered:  # more than each block before
        engine.parts.note_gathered(needed)
        if engine.ranks.is_main_rank:
            logger.warning(
                "GatheredParameters holds %d units at once, for which the plan has too few buffers: %d more take %s "
                "bytes on each rank until its block ends. To avoid it, %s.",
                len(units),
                sizes.total(),
                f"{needed:,}",
                _LESS,
            )
    buffers.grant(sizes)
    return sizes


def check_room(engine: BaseEngine, needed: int) -> None:
    """Raise OutOfMemoryError on all ranks if `needed` bytes of the model's memory are too many on one. Collective."""
    available, memory = min(engine.ranks.gather(min(_spaces(engine))))
    if needed > available:
        raise OutOfMemoryError(memory, needed, available, _LESS)


def _spaces(engine: BaseEngine) -> Iterator[tuple[int, str]]:
    """Yield bytes that may be added in a memory, with its name for an error: the available memory of this rank, and the
    rest of each limit of `infinity.memory` that a user has set.
    """
    parts = engine.parts
    plan = parts.plan
    added = parts.pools[UNITS].extra_nbytes
    on_host = plan.device.type == "cpu"
    # Ranks of a node that compute in its memory measure it before any of them adds to it.
    free = parts.device.available_bytes() // (engine.ranks.local_size if on_host else 1)
    yield max(0, free), f"{'host' if on_host else 'device'} memory for the parameters of GatheredParameters"
    if plan.device.limit:
        left = plan.device.limit - plan.peak_nbytes()[TierKind.DEVICE] - added
        yield max(0, left), "device memory (infinity.memory.device) for the parameters of GatheredParameters"
    if on_host and plan.budget.host is not None and engine.config.infinity.memory.host != "auto":
        left = plan.budget.host - plan.peak_of_host() - added
        yield max(0, left), "host memory (infinity.memory.host) for the parameters of GatheredParameters"

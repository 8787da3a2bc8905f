"""All buffer pools of an engine, made from their specs and registered with its tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from infinity.plan.pools import PoolSpec
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.pool import Pool


class Pools:
    """Pools by name. debug: poison released buffers, and reuse the one that has been free longest."""

    def __init__(self, specs: Iterable[PoolSpec], device: Device, tiers: Iterable[Tier], *, debug: bool) -> None:
        self._tier_of: dict[str, str] = {}
        self._pools: dict[str, Pool] = {}
        registered = list(tiers)
        for spec in specs:
            allocate = device.empty if spec.tier.on_device else device.host_buffer
            make = partial(_registered, allocate, device, registered)
            poison = device.poison if debug else None
            self._pools[spec.name] = Pool(make, spec.sizes, name=spec.name, poison=poison, fifo=debug)
            self._tier_of[spec.name] = spec.tier

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def get(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def of_tier(self, tier: str) -> list[Pool]:
        """Return the pools whose buffers are in `tier`."""
        return [pool for name, pool in self._pools.items() if self._tier_of[name] == tier]

    def nbytes(self, tier: str) -> int:
        """Return the bytes of all buffers in `tier`."""
        return sum(pool.nbytes for name, pool in self._pools.items() if self._tier_of[name] == tier)


def _registered(
    allocate: Callable[[int], torch.Tensor], device: Device, tiers: Sequence[Tier], nbytes: int
) -> torch.Tensor:
    """Return a buffer that is registered with `tiers`. Refers to no model, which a pool must not keep alive."""
    memory = allocate(nbytes)
    # Every tier, since a buffer of the pool may be read from any of them.
    if device.is_host(memory):
        for tier in tiers:
            tier.register(memory)
    return memory

"""All-gathers of several ranks, as the engine issues them; rank 0 leads."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist

from infinity.comm.communicator import Communicator
from infinity.comm.groups import destroy_group, duplicate_group
from infinity.errors import RanksError
from infinity.plan.layout import SHARD_ALIGNMENT, Slot, UnitLayout
from infinity.tiers.device import Device
from infinity.tiers.transfer import DONE, Transfer

_UNIT = 64 << 20


class Gathers:
    """The all-gather of a unit of bf16 parameters. Needs torch's process group. A context manager.

    Rank 0 calls `run`; the other ranks `follow` it until it closes. nbytes: of the gathered unit, rounded up.
    """

    def __init__(self, device: Device, nbytes: int = _UNIT) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._orders = duplicate_group(world, "gloo")
        self._ranks = Communicator(device)
        whole = SHARD_ALIGNMENT * self._ranks.size
        numel = -(-nbytes // torch.bfloat16.itemsize // whole) * whole
        slot = Slot("weight", (numel,), 0, 0)
        self._ranks.set_layouts([UnitLayout(0, "unit", (slot,), torch.bfloat16, True, numel, self._ranks.size)])
        self._flat = device.empty(numel * torch.bfloat16.itemsize).view(torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    @property
    def backend(self) -> str:
        return self._ranks.backend

    def run(self, calls: int) -> None:
        """Perform that many all-gathers with all ranks."""
        self._agree(calls)
        self._gather(calls)

    def follow(self) -> None:
        """Perform what rank 0 runs, until it closes."""
        while calls := self._agree(0):
            self._gather(calls)

    def _gather(self, calls: int) -> None:
        transfer: Transfer = DONE
        for _ in range(calls):
            transfer = self._ranks.all_gather(self._flat, DONE, 0)
        transfer.wait()

    def _agree(self, calls: int) -> int:
        """Return the number of rank 0."""
        order = torch.tensor([calls])
        try:
            dist.broadcast(order, 0, group=self._orders)
        except RuntimeError as error:
            raise RanksError(f"another rank ended: see its output ({error})") from error
        return int(order)

    def close(self) -> None:
        """End the measurement on all ranks."""
        if self._ranks.is_main_rank:
            self._agree(0)
        self._ranks.close()
        destroy_group(self._orders)

    def __enter__(self) -> Gathers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the launcher ends the other ranks, which may wait in a collective.
        if kind is None:
            self.close()

"""Cases for the processes of a `support.ranks.Group`: units that are updated in host memory alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from infinity.engine.training import TrainingEngine
from infinity.plan.pools import UNITS
from multirank.cases import SAMPLES, device_of
from multirank.kept_cases import LEARNING_RATE, Net, batches
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of
from support.models import seeded


class Holding(Net):
    """A net on a rank that keeps more than others do, from each forward to the next: "nothing", "graphs" of a second
    product with each weight, or "views" of each weight. probes: freeze all layers but two, and use the last one without
    gradients.

    With `probes`, a unit that is not used in backward has its next use after those of the units that are updated there.
    """

    def __init__(self, holds: str = "nothing", *, probes: bool = False) -> None:
        super().__init__()
        self._holds = holds
        self._probes = probes
        if probes:
            self.layers.requires_grad_(False)
            self.layers[3:5].requires_grad_(True)
        self._held: list[torch.Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self._hold)

    def _hold(self, layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        if self._holds == "graphs":
            self._held.append(F.linear(*inputs, layer.weight))
        elif self._holds == "views":
            self._held.append(layer.weight.detach()[:3])

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._held.clear()
        for layer in self.layers[:-1]:
            x = layer(x)
        with torch.set_grad_enabled(not self._probes):
            probed = self.layers[-1](x)
        return F.mse_loss(x + 0 * probed if self._probes else probed, targets)


def training(
    rank: int, *, late: bool = True, holder: int = 0, holds: str = "nothing", probes: bool = False, **options: Any
) -> dict[str, Any]:
    """Train with parameters and states in host memory, and updates during backward.

    holder: the rank that `holds` more than others do (`Holding`). Copies of rank 1 take longer than those of rank 0.

    Returns losses, final values, the number of buffers, and step by step: the units updated before the end of backward,
    the copies to the device besides those of fetches, and the gathers.
    """
    config = engine_config(
        "cpu", "cpu", micro=SAMPLES, lr=LEARNING_RATE, unit_size=4096, update="during_backward", **options
    )
    device = device_of(rank, late)
    model = seeded(lambda: Holding(holds if rank == holder else "nothing", probes=probes))
    with _views_are_expected(), open_engine(model, config, device) as engine:
        losses, early, seen = [], [], [_seen(engine, device)]
        for batch in batches(rank):
            loss = engine(*batch)
            engine.backward(loss)
            early.append([unit.index for unit in engine.units if unit.updated_early])
            engine.step()
            losses.append(loss.item())
            del loss
            for unit in engine.units:
                if unit.update is not None:
                    unit.update.done.wait()
            seen.append(_seen(engine, device))
        ups, gathers = ([now[n] - before[n] for before, now in pairwise(seen)] for n in range(2))
        buffers = engine.parts.plan.buffers(UNITS)
        values = parameters_of(engine)
    return {"losses": losses, "early": early, "ups": ups, "gathers": gathers, "buffers": buffers, "values": values}


def _seen(engine: TrainingEngine, device: Any) -> tuple[int, int]:
    """Return the copies to the device so far, less one for each fetch, and the gathers."""
    ups = device.to_device.copies - engine.parts.store.fetches if isinstance(device, LateDevice) else 0
    return ups, engine.parts.ranks.traffic.all_gathers


@contextmanager
def _views_are_expected() -> Iterator[None]:
    warnings.filterwarnings("ignore", "something still refers")
    try:
        yield
    finally:
        warnings.filterwarnings("error", "something still refers to the parameters of unit", UserWarning)

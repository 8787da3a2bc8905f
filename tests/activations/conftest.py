"""Stores of saved activations for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.activations import disk
from infinity.activations.disk import DiskRoom
from infinity.activations.store import ActivationStore
from infinity.config import Config
from infinity.plan.io import plan_activations
from infinity.tiers.device import CpuDevice
from infinity.tiers.io import engine_of
from support.locked import locked

Make = Callable[..., ActivationStore]


def room_config(folder: Path, **options: object) -> Config:
    """A config whose activations of 256 bytes or more go to files in `folder`. options: more keys of the section."""
    section = {"device": "nvme", "nvme_path": str(folder), "min_bytes": 256, "memory_bytes": 4096, **options}
    return Config.load({"infinity": {"activations": section}})


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the smallest size, so that a few tensors need several."""
    monkeypatch.setattr(disk, "_SEGMENT", 64 << 10)


@pytest.fixture
def make_store(tmp_path: Path, small_files: None) -> Iterator[Make]:
    """make_store(kind, options...): a store on the CPU, whose room is of the class `kind`."""
    made: list[ActivationStore] = []
    store_class = locked(ActivationStore, "_leaving", "_leftovers")

    def make(kind: type[DiskRoom] = DiskRoom, **options: object) -> ActivationStore:
        device = CpuDevice()
        plan = plan_activations(room_config(tmp_path, **options), device.info)
        assert plan is not None and plan.io is not None
        made.append(store_class(kind(plan.io, engine_of(plan.io), device, 0), device, plan))
        return made[-1]

    yield make
    for store in made:
        store.close()

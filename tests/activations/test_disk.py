"""Files of saved activations grow as needed, and a full disk is one error that names the key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from activations.conftest import Make, room_config
from infinity.activations import disk
from infinity.activations.disk import DiskRoom
from infinity.errors import OutOfSpaceError
from infinity.plan.io import plan_activations
from infinity.tiers.device import CpuDevice
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import engine_of


@pytest.fixture
def room(tmp_path: Path, small_files: None) -> Iterator[DiskRoom]:
    before = len(os.listdir("/proc/self/fd"))
    device = CpuDevice()
    plan = plan_activations(room_config(tmp_path), device.info)
    assert plan is not None and plan.io is not None
    made = DiskRoom(plan.io, engine_of(plan.io), device, 0)
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_extents_of_all_files_keep_their_bytes(room: DiskRoom) -> None:
    sizes = [1, 4095, 4096, 65536, 65537, 200_000, 9 << 20, 3, 70_000]
    written = []
    for number, nbytes in enumerate(sizes):
        source = torch.full((nbytes,), number + 1, dtype=torch.uint8)
        extent = room.reserve(nbytes)
        room.write(extent, source).wait()
        written.append((extent, source))
    assert len(room._files) > 2
    for extent, source in reversed(written):
        destination = torch.zeros_like(source)
        room.read(extent, destination).wait()
        assert torch.equal(destination, source)


def test_only_whole_pages_are_transferred(room: DiskRoom) -> None:
    """The page cache is not used, as a write of part of a page would."""
    extent = room.reserve(100_001)
    room.write(extent, torch.ones(100_001, dtype=torch.uint8)).wait()
    room.read(extent, torch.empty(100_001, dtype=torch.uint8)).wait()
    assert room._engine.bytes_buffered == 0 or not room._files[0].direct


def test_freed_room_is_used_again(room: DiskRoom) -> None:
    for nbytes in (100_000, 300_000, 64_000) * 20:
        extents = [room.reserve(nbytes) for _ in range(3)]
        for extent in extents:
            room.free(extent)
    assert room.nbytes <= 3 * 300_000 * 3


def test_a_full_disk_names_the_key_and_a_smaller_batch_continues(
    make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 10 * (64 << 10)

    def small(folders: Any, nbytes: int, **options: Any) -> Any:
        nonlocal room
        if nbytes > room:
            raise OutOfSpaceError(str(folders[0]), nbytes, room, "")
        room -= nbytes
        return open_swap_files(folders, nbytes, **options)

    monkeypatch.setattr(disk, "open_swap_files", small)
    store = make_store()
    saved = []
    with pytest.raises(OutOfSpaceError, match=r"infinity\.activations\.nvme_path") as caught:
        for _ in range(64):
            saved.append(store.save(torch.zeros(1024)))
    assert caught.value.needed == 64 << 10 and 8 <= len(saved) <= 24
    saved.clear()
    del caught  # its traceback refers to tensors
    for _ in range(3):
        again = [store.save(torch.ones(1024)) for _ in range(8)]
        assert all(part is not None and part.restore().all() for part in again)
        del again

"""Saved tensors come back with the same bytes and layout, whatever leaves memory meanwhile."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from activations.conftest import Make
from infinity.activations.room import HostRoom
from infinity.activations.store import ActivationStore, SavedActivation
from infinity.errors import LifetimeError, UsageError
from infinity.native import _aio
from support.late_device import LateDevice
from support.late_room import HeldRoom, LateRoom

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn)  # fmt: skip


def filled(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Random bytes as `dtype`, NaN patterns included; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    data = torch.randint(0, top, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).clone()


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return bytes(tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy())


def saved_in(store: ActivationStore, tensor: torch.Tensor) -> SavedActivation:
    saved = store.save(tensor)
    assert saved is not None
    return saved


def push_out(store: ActivationStore, nbytes: int = 1 << 16) -> list[SavedActivation]:
    """Save more than the store keeps in memory, so that earlier tensors leave."""
    return [saved_in(store, torch.zeros(1024)) for _ in range(nbytes // 4096)]


@st.composite
def layouts(draw: Any) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...], int]:
    """dtype, elements of the storage, size, stride and offset of a view in it. Strides may be 0 and overlap."""
    dtype = draw(st.sampled_from(DTYPES))
    size = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    stride = tuple(draw(st.integers(0, 40)) for _ in size)
    offset = draw(st.integers(0, 20))
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    numel = last + 1 + draw(st.integers(0, 300))
    return dtype, max(numel, 256 // dtype.itemsize), size, stride, offset


@given(st.lists(layouts(), min_size=1, max_size=6), st.randoms())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_view_comes_back_with_its_bytes_and_layout(make_store: Make, views: list[Any], random: Any) -> None:
    store = make_store(LateRoom)
    expected, saved = [], []
    for number, (dtype, numel, size, stride, offset) in enumerate(views):
        tensor = filled(dtype, numel, number).as_strided(size, stride, offset)
        if dtype.is_complex and number % 2:
            tensor = tensor.conj()
        expected.append((bits(tensor), tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj()))
        saved.append(saved_in(store, tensor))
        del tensor
    fillers = push_out(store)
    away = [one.stored.memory is None for one in saved]
    assert all(away), "nothing left memory"
    order = list(range(len(saved)))
    random.shuffle(order)
    for number in order:
        tensor = saved[number].restore()
        assert (bits(tensor), tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj()) == expected[number]
    del fillers


def test_views_of_one_storage_are_moved_once(make_store: Make) -> None:
    store = make_store()
    whole = torch.arange(3 * 1024, dtype=torch.float32)
    saved = [saved_in(store, part) for part in (*whole.split(1024), whole, whole[::2])]
    assert len({id(one.stored) for one in saved}) == 1
    del whole
    fillers = push_out(store, 1 << 14)
    written = store.room.bytes_written
    parts = [one.restore() for one in saved]
    assert written <= 3 * 4096 + (1 << 14) and store.room.bytes_read == 3 * 4096
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert torch.equal(parts[1], torch.arange(1024, 2048, dtype=torch.float32))
    del fillers


def test_what_others_hold_stays_and_is_not_written(make_store: Make) -> None:
    store = make_store()
    held = torch.ones(4096)
    saved = saved_in(store, held)
    for _ in range(3):
        push_out(store)
    assert saved.stored.extent is None and saved.restore().data_ptr() == held.data_ptr()
    held.data.fill_(2)  # torch does not see it either
    assert saved.restore()[0] == 2
    del held
    fillers = push_out(store)
    assert saved.stored.memory is None and saved.restore()[0] == 2
    del fillers


def test_a_storage_that_others_hold_stays(make_store: Make) -> None:
    """A kept `untyped_storage()` can be edited, resized and filled again without a version."""
    store = make_store()
    held = torch.ones(4096)
    storage = held.untyped_storage()
    saved = saved_in(store, held)
    del held
    fillers = push_out(store)
    assert saved.stored.extent is None
    torch.empty(0).set_(storage, 0, (4096,), (1,)).fill_(2)
    assert saved.restore()[0] == 2
    storage.resize_(0)
    storage.resize_(4 * 4096).copy_(torch.full((4096,), 3.0).untyped_storage())
    assert saved.restore()[0] == 3
    del storage
    fillers += push_out(store)
    assert saved.stored.memory is None and saved.restore()[0] == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8),
        torch.from_numpy(np.zeros(4096, dtype=np.float32)),
        nn.Parameter(torch.zeros(4096)),
        torch.zeros(4096).to_sparse(),
        torch.zeros(4096, device="meta"),
        torch.zeros(1).expand(4096),
    ],
    ids=["small", "numpy", "subclass", "sparse", "other device", "small storage"],
)
def test_tensors_that_are_not_torchs_own_memory_stay(make_store: Make, tensor: torch.Tensor) -> None:
    assert make_store().save(tensor) is None


def test_an_edit_in_place_is_an_error_before_and_after_the_memory_left(make_store: Make) -> None:
    store = make_store()
    for leaves in (False, True):
        tensor = torch.zeros(4096)
        other = tensor.view(64, 64)
        saved = saved_in(store, tensor)
        other.add_(1)
        later = saved_in(store, tensor)
        del tensor, other
        fillers = push_out(store) if leaves else []
        assert (saved.stored.memory is None) == leaves
        with pytest.raises(LifetimeError, match=r"modified by an inplace operation.*version 1, but version 0"):
            saved.restore()
        assert bool((later.restore() == 1).all())
        del fillers


def test_an_edit_of_what_came_back_is_an_error_of_the_next_use(make_store: Make) -> None:
    store = make_store()
    saved = saved_in(store, torch.zeros(4096))
    fillers = push_out(store)
    saved.restore().add_(1)
    for _ in range(2):
        with pytest.raises(LifetimeError, match="modified by an inplace operation"):
            saved.restore()
        fillers += push_out(store)
        fillers[-1].restore()


def test_what_backward_used_leaves_again(make_store: Make) -> None:
    """As with retain_graph: no backward holds more than the window, however often it runs."""
    store = make_store(LateRoom)
    saved = [saved_in(store, torch.full((1024,), float(number))) for number in range(32)]
    for _ in range(3):
        for number in reversed(range(32)):
            assert bool((saved[number].restore() == number).all())
            assert sum(one.stored.memory is not None for one in saved) <= 4
    assert store.room.bytes_written <= 32 * 4096


def test_the_next_ones_are_read_ahead(make_store: Make) -> None:
    store = make_store(memory_bytes=32768)
    saved = [saved_in(store, torch.full((1024,), float(number))) for number in range(64)]
    for number in range(63, 20, -1):
        del saved[number + 1 :]
        saved[number].restore()
    assert [one.stored.number for one in saved if one.stored.memory is not None] == [18, 19, 20, 21]


def test_memory_and_room_are_freed_with_the_last_reference(make_store: Make) -> None:
    store = make_store()
    gc.collect()
    gc.disable()
    try:
        saved = [saved_in(store, torch.zeros(1024)) for _ in range(64)]
        reserved = store.room.nbytes
        assert reserved >= 48 * (64 << 10)
        del saved
        assert len(store._all) == len(store._resident) == 0
        for _ in range(8):
            saved = [saved_in(store, torch.zeros(1024)) for _ in range(60)]
            del saved
        assert store.room.nbytes <= 1.5 * reserved
    finally:
        gc.enable()


def test_room_of_a_transfer_under_way_is_not_reused(make_store: Make) -> None:
    """The reference goes while its bytes are on their way; the next tensor takes other room until they have arrived."""
    store = make_store(LateRoom)
    kept = []
    for round_ in range(20):
        saved = [saved_in(store, torch.full((1024,), float(round_))) for _ in range(8)]
        saved[2].restore()  # reads ahead
        del saved
        kept.append(saved_in(store, torch.full((1024,), float(round_))))
    for round_, one in enumerate(kept):
        assert bool((one.restore() == round_).all())


@pytest.mark.parametrize("where", ["write", "read"])
def test_a_failed_transfer_raises_and_can_be_repeated(make_store: Make, where: str) -> None:
    after = 0 if where == "write" else 3
    _aio._inject([{"where": "event", "error": errno.EIO, "only": where, "after": after, "times": 1}])
    try:
        store = make_store()
        saved = []
        errors = []
        for number in range(32):
            try:
                saved.append(saved_in(store, torch.full((1024,), float(number))))
            except OSError as error:
                errors.append(error)
                saved.append(saved_in(store, torch.full((1024,), float(number))))
        for number in reversed(range(32)):
            try:
                tensor = saved[number].restore()
            except OSError as error:
                errors.append(error)
                tensor = saved[number].restore()
            assert bool((tensor == number).all())
        (error,) = errors
        assert error.errno == errno.EIO and "saved activations" in str(error)
    finally:
        _aio._inject([])


def test_bytes_are_used_once_they_have_arrived(make_store: Make) -> None:
    store = make_store(HeldRoom)
    saved = [saved_in(store, torch.full((1024,), float(number))) for number in range(32)]
    for number in reversed(range(32)):
        assert bool((saved[number].restore() == number).all())


def test_a_save_does_not_wait_for_writes_while_the_window_has_room(make_store: Make) -> None:
    store = make_store(HeldRoom, memory_bytes=32768)
    saved = [saved_in(store, torch.zeros(1024)) for _ in range(7)]
    leaving = [one.stored for one in saved if one.stored.leaves]
    assert len(leaving) > 1
    assert not any(one.transfer is None or one.transfer.done() for one in leaving)


def test_room_is_used_again_only_after_a_write_that_nobody_needs_any_more(make_store: Make) -> None:
    """The write of a storage that is gone arrives after those of later storages."""
    store = make_store(HeldRoom, memory_bytes=32768)
    saved = [saved_in(store, torch.full((1024,), 1.0)) for _ in range(7)]
    transfers = [one.stored.transfer for one in saved if one.stored.leaves]
    del saved
    others = [saved_in(store, torch.full((1024,), 2.0)) for _ in range(20)]
    assert others[0].stored.memory is None
    for transfer in transfers:
        assert transfer is not None and not transfer.done()
        transfer.wait()
    assert all(bool((one.restore() == 2).all()) for one in others)


def test_closing_waits_for_all_transfers(make_store: Make) -> None:
    """Also for those of storages that are gone, whose memory they use."""
    store = make_store(HeldRoom, memory_bytes=32768)
    saved = [saved_in(store, torch.zeros(1024)) for _ in range(7)]
    transfers = [one.stored.transfer for one in saved if one.stored.leaves]
    del saved[0]
    store.close()
    assert len(transfers) > 1 and all(transfer is not None and transfer.done() for transfer in transfers)


def test_a_closed_store_gives_back_only_what_is_in_memory(make_store: Make) -> None:
    store = make_store()
    saved = [saved_in(store, torch.full((1024,), float(number))) for number in range(32)]
    store.close()
    assert saved[31].restore()[0] == 31 and store.save(torch.zeros(4096)) is None
    with pytest.raises(UsageError, match="closed"):
        saved[0].restore()


def test_checksums_cover_activations(tmp_path: Path, small_files: None) -> None:
    from infinity.activations.disk import open_activations
    from infinity.config import Config
    from infinity.plan.io import plan_activations
    from infinity.tiers.device import CpuDevice

    section = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 256, "memory_bytes": 4096}
    config = Config.load({"aio": {"checksum": True}, "infinity": {"activations": section}})
    device = CpuDevice()
    store = open_activations(plan_activations(config, device.info), device, 0)
    assert store is not None
    saved = [saved_in(store, torch.full((number * 100 + 64,), float(number))) for number in range(64)]
    for number in reversed(range(64)):
        assert bool((saved[number].restore() == number).all())
    store.close()


def test_host_memory_is_released_after_the_copy_that_reads_it() -> None:
    """Compute awaits such a copy on its stream, so the host may be ahead of it."""
    device = LateDevice(delay=30)
    room = HostRoom(device)
    extent = room.reserve(4096)
    room.write(extent, device.empty(4096)).wait()
    read = room.read(extent, device.empty(4096))
    room.free(extent)
    assert not read.done()
    larger = room.reserve(3 * 4096)
    assert read.done() and room.nbytes == 3 * 4096
    last = room.read(larger, device.empty(3 * 4096))
    room.close()
    assert last.done()

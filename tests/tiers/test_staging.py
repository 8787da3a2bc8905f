"""The nvme tier keeps memory as long as the disk may use it, even after errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from infinity.plan.placement import Extent
from infinity.plan.pools import STAGED_READS, STAGED_WRITES, STAGING_BYTES
from infinity.tier_kind import TierKind
from infinity.tiers import read_ahead, staging
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.memory import host_tensor, storage_users
from infinity.tiers.nvme import NvmeTier, Request
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import Failed, Transfer, issued
from support.late_device import LateDevice
from support.late_disk import LateNvmeTier, LateTransfer

PIECES = 3
BUFFERS = STAGED_READS + STAGED_WRITES
NBYTES = PIECES * STAGING_BYTES
EXTENT = Extent(TierKind.NVME, 0, NBYTES, "parameters of unit 0")


class FirstFails(NvmeTier):
    """A tier whose first transfer fails; the others are carried out when they are waited for. free: the number of free
    staging buffers at each of these waits.
    """

    started: int = 0
    free: list[int]

    def _late(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        self.started += 1
        if self.started == 1:
            return Failed(OSError(5, "Input/output error", "swap"))
        return LateTransfer(lambda: self.free.append(self.free_buffers()))

    def free_buffers(self) -> int:
        assert self._staging is not None
        return sum(sum(map(len, pool._free.values())) for pool in (self._staging._reading, self._staging._writing))

    _read = _write = _late


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FirstFails]:
    engine = open_engine(block_size=1 << 20, queue_depth=4, threads=1)
    made = FirstFails(open_swap_files([tmp_path], NBYTES, name="x"), NBYTES, engine, LateDevice())
    made.free = []
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_staging_buffer_is_kept_until_its_transfer_has_ended(tier: FirstFails, kind: str) -> None:
    """A failed part ends the whole transfer, but the next part's buffer stays leased until the disk is done with it."""
    memory = tier._device.empty(NBYTES)
    with pytest.raises(OSError, match="Input/output error"):
        getattr(tier, kind)(EXTENT, memory).wait()
    pieces = PIECES if kind == "read" else STAGED_WRITES  # under way at once
    assert tier.started == pieces
    assert tier.free == [BUFFERS - pieces + 1 + ended for ended in range(pieces - 1)]  # the failed transfer's first
    assert tier.free_buffers() == BUFFERS


class FailingCopies(LateDevice):
    """A device whose copies fail."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        return Failed(RuntimeError("CUDA error"))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_staging_buffer_is_returned_after_a_failed_copy(tmp_path: Path, kind: str) -> None:
    """Each failure is raised: a buffer that was not returned would be waited for without end."""
    device = FailingCopies()
    file = open_swap_files([tmp_path], STAGING_BYTES, name="x")
    tier = NvmeTier(file, STAGING_BYTES, open_engine(block_size=1 << 20, queue_depth=4, threads=1), device)
    for _ in range(BUFFERS + 1):
        with pytest.raises(RuntimeError, match="CUDA error"):
            getattr(tier, kind)(EXTENT, device.empty(STAGING_BYTES)).wait()
    tier.close()


class FirstCopyFails(LateDevice):
    """A device whose first copy fails."""

    failed = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Any:
        if self.failed:
            return super().copy(destination, source, after=after)
        self.failed = True
        return Failed(RuntimeError("CUDA error"))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_one_copy_that_fails_fails_the_whole_transfer(tmp_path: Path, kind: str) -> None:
    device = FirstCopyFails()
    file = open_swap_files([tmp_path], NBYTES, name="x")
    tier = NvmeTier(file, NBYTES, open_engine(block_size=1 << 20, queue_depth=4, threads=1), device)
    with pytest.raises(RuntimeError, match="CUDA error"):
        getattr(tier, kind)(EXTENT, device.empty(NBYTES)).wait()
    tier.close()


class Interrupted:
    """A native request whose wait is interrupted by Ctrl-C while the request goes on."""

    mismatch = False
    ended = False

    def wait(self) -> None:
        raise KeyboardInterrupt

    def done(self) -> bool:
        return self.ended

    def take_repaired(self) -> list[tuple[int, int, str, int]]:
        return []


def test_memory_is_kept_while_a_request_goes_on() -> None:
    memory = host_tensor(4096)
    unshared = storage_users(memory)
    native = Interrupted()
    request = Request(native, memory[:512], EXTENT)  # type: ignore[arg-type]
    for ended, users in ((False, unshared + 1), (True, unshared)):
        native.ended = ended
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        assert request.done() == ended
        assert storage_users(memory) == users


def test_queued_writes_do_not_delay_a_read(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Waiting(NvmeTier):
        def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            return LateTransfer(lambda: go_on.wait(60))

        def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            return LateTransfer(lambda: memory.fill_(7))

    engine = open_engine(block_size=1 << 20, queue_depth=4, threads=1)
    tier = Waiting(open_swap_files([tmp_path], NBYTES, name="x"), NBYTES, engine, LateDevice())
    try:
        source, target = tier._device.empty(NBYTES), tier._device.empty(STAGING_BYTES)
        writes = [tier.write(EXTENT, source) for _ in range(3)]
        tier.read(EXTENT, target).wait()
        assert (target == 7).all() and not any(write.done() for write in writes)
        go_on.set()
        for write in writes:
            write.wait()
    finally:
        go_on.set()
        tier.close()


# -- reads ahead of device buffers -------------------------------------------------------------------------------------

PIECE = 64 << 10
UNIT = PIECE + 4096  # two pieces
UNITS = [Extent(TierKind.NVME, index * UNIT, UNIT, f"parameters of unit {index}") for index in range(4)]


class Counted(LateNvmeTier):
    """A tier whose transfers are late, with the extents of its reads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.reads: list[str] = []
        super().__init__(*arguments, **options)

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        self.reads.append(extent.name[-1] + "ab"[offset // PIECE])
        return super()._read(extent, memory, offset)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Extents full of their number, and room for three pieces to read ahead."""
    for module in (staging, read_ahead):
        monkeypatch.setattr(module, "STAGING_BYTES", PIECE)
    engine = open_engine(block_size=1 << 20, queue_depth=4, threads=1)
    file = open_swap_files([tmp_path], len(UNITS) * UNIT, name="x")
    tier = Counted(file, file.nbytes, engine, LateDevice(), ahead={PIECE: 3})
    for number, extent in enumerate(UNITS):
        tier.write(extent, filled(number)).wait()
    yield tier
    tier.close()
    assert tier._staging is not None
    for pool in (tier._staging._reserved, tier._staging._reading, tier._staging._writing):
        assert not pool.leased


def filled(value: int) -> torch.Tensor:
    memory = host_tensor(UNIT)
    memory.fill_(value)
    return memory


def value_of(tier: Counted, extent: Extent) -> int:
    """Read an extent into device memory, where all bytes are equal."""
    target = tier._device.empty(UNIT)
    tier.read(extent, target).wait()
    assert (target == target[0]).all()
    return int(target[0])


def test_a_read_takes_what_was_read_ahead(counted: Counted) -> None:
    counted.read_ahead(UNITS[1:])
    assert counted.reads == ["1a", "1b", "2a"]
    assert [value_of(counted, extent) for extent in UNITS[1:3]] == [1, 2]
    assert counted.reads == ["1a", "1b", "2a", "2b"]


def test_copies_are_issued_before_the_ones_before_have_ended(counted: Counted) -> None:
    """A host buffer is filled again only after the copy that reads it."""
    counted._device.to_device.delay = 60
    counted.read_ahead(UNITS[:1])
    targets = [counted._device.empty(UNIT) for _ in UNITS]
    first = issued(counted.read(UNITS[0], targets[0]))
    assert not first.done()
    counted.read_ahead(UNITS[1:])
    reads = [counted.read(extent, target) for extent, target in zip(UNITS[1:], targets[1:], strict=True)]
    for copies in [issued(read) for read in reads]:
        copies.wait()
    assert [set(target.tolist()) for target in targets] == [{0}, {1}, {2}, {3}]


def test_extents_that_are_wanted_no_more_make_room(counted: Counted) -> None:
    counted.read_ahead(UNITS[:2])
    counted.read_ahead(UNITS[2:])  # the reads of others have not ended, and nothing waits for them
    assert counted.reads == ["0a", "0b", "1a"]
    for pieces in (*counted._staging.ahead._pieces.values(), counted._staging.ahead._dropped):
        for piece in pieces:
            piece.arrived.wait()
    counted.read_ahead(UNITS[2:])
    assert counted.reads[3:] == ["2a", "2b", "3a"]
    assert [value_of(counted, extent) for extent in UNITS] == [0, 1, 2, 3]


@pytest.mark.parametrize("from_device", [False, True])
def test_a_write_drops_what_was_read_ahead(counted: Counted, from_device: bool) -> None:
    counted.read_ahead(UNITS[1:2])
    source = filled(9)
    if from_device:
        there = counted._device.empty(UNIT)
        counted._device.copy(there, source).wait()
        source = there
    counted.write(UNITS[1], source).wait()
    assert value_of(counted, UNITS[1]) == 9


def test_a_read_ahead_that_fails_is_raised_by_the_read(counted: Counted) -> None:
    counted.read_ahead(UNITS[:1])
    assert counted._staging is not None
    piece = counted._staging.ahead._pieces[0][1]
    piece.arrived = Failed(OSError(5, "Input/output error", "swap"))
    with pytest.raises(OSError, match="Input/output error"):
        value_of(counted, UNITS[0])
    assert value_of(counted, UNITS[0]) == 0  # another one


def test_buffers_may_be_released_by_the_thread_that_reads_ahead(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so between the other thread's look for a buffer and its release of one."""
    staged, raced = counted._staging, list[bool]()
    assert staged is not None
    try_lease = staged._reading.try_lease

    def race(nbytes: int) -> Lease | None:
        lease = try_lease(nbytes)
        if lease is None:
            for copy, _ in list(staged._copying):
                copy.wait()
            staged._release_copied()
            raced.append(True)
        return lease

    monkeypatch.setattr(staged._reading, "try_lease", race)
    assert [value_of(counted, extent) for extent in UNITS] == [0, 1, 2, 3]
    assert raced


def test_close_ends_reads_ahead(counted: Counted) -> None:
    counted.read_ahead(UNITS)  # the fixture checks that no buffer is leased


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["ahead", "read", "write"]), st.integers(0, 3), st.integers(0, 3))))
def test_reads_show_the_last_write_whatever_was_read_ahead(counted: Counted, calls: list[tuple[str, int, int]]) -> None:
    expected = [value_of(counted, extent) for extent in UNITS]
    for call, first, second in calls:
        if call == "ahead":
            counted.read_ahead([UNITS[index] for index in dict.fromkeys((first, second))])
        elif call == "read":
            assert value_of(counted, UNITS[first]) == expected[first]
        else:
            expected[first] = 10 + second
            counted.write(UNITS[first], filled(expected[first])).wait()
    assert [value_of(counted, extent) for extent in UNITS] == expected

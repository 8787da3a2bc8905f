"""The nvme tier keeps memory as long as the disk may use it, even after errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.plan.pools import STAGING_BUFFERS, STAGING_BYTES
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.memory import host_tensor, storage_users
from infinity.tiers.nvme import NvmeTier, _Request
from infinity.tiers.transfer import Failed, Transfer
from support.late_device import LateDevice
from support.late_disk import LateTransfer

PIECES = 3
NBYTES = PIECES * STAGING_BYTES
EXTENT = Extent("nvme", 0, NBYTES, "parameters of unit 0")


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
        return LateTransfer(lambda: self.free.append(sum(map(len, self._staging._free.values()))))

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
    count = sum(tier._staging._counts.values())
    with pytest.raises(OSError, match="Input/output error"):
        getattr(tier, kind)(EXTENT, memory).wait()
    assert tier.started == 2
    assert tier.free == [count - 1]  # free is the failed transfer's buffer
    assert sum(map(len, tier._staging._free.values())) == count


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
    for _ in range(STAGING_BUFFERS + 1):
        with pytest.raises(RuntimeError, match="CUDA error"):
            getattr(tier, kind)(EXTENT, device.empty(STAGING_BYTES)).wait()
    tier.close()


class Interrupted:
    """A native request whose wait is interrupted by Ctrl-C while the request goes on."""

    mismatch = False
    ended = False

    def wait(self) -> None:
        raise KeyboardInterrupt

    def done(self) -> bool:
        return self.ended


def test_memory_is_kept_while_a_request_goes_on() -> None:
    memory = host_tensor(4096)
    unshared = storage_users(memory)
    native = Interrupted()
    request = _Request(native, memory[:512], EXTENT)  # type: ignore[arg-type]
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

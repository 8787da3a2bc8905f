"""Order on an accelerator with streams: of copies, of compute on several streams, of poison in released buffers.

Nothing runs that is not waited for, so an order that is missing shows.
"""

from __future__ import annotations

import threading

import pytest
import torch

from infinity.tiers.pool import Pool
from infinity.tiers.transfer import DONE, Failed
from late.device import LateAccelerator
from support.late_disk import LateTransfer

BYTES = torch.arange(64, dtype=torch.uint8)


def test_a_copy_within_host_memory_follows_another_transfer(lazy: None) -> None:
    device = LateAccelerator()
    there = torch.arange(64, dtype=torch.uint8, device=device.torch_device)
    first, second = device.host_buffer(64), device.host_buffer(64)
    assert device.copy(second, first, after=device.copy(first, there)) is DONE
    assert torch.equal(second, BYTES)


def test_a_copy_to_the_device_follows_a_read(lazy: None) -> None:
    """A transfer that is no work of a stream is waited for by the host."""
    device = LateAccelerator()
    host, there = device.host_buffer(64), device.empty(64)
    device.copy(there, host, after=LateTransfer(lambda: host.copy_(BYTES))).wait()
    assert torch.equal(there.cpu(), BYTES)


def test_work_that_follows_a_failed_read_is_refused(lazy: None) -> None:
    device = LateAccelerator()
    failed = Failed(OSError(5, "Input/output error", "swap"))
    with pytest.raises(OSError, match="Input/output error"):
        device.await_copy(failed)
    with pytest.raises(OSError, match="Input/output error"):
        device.copy(device.empty(64), device.host_buffer(64), after=failed)


def test_finish_waits_for_copies_in_both_directions(lazy: None) -> None:
    device = LateAccelerator()
    hosts = [device.host_buffer(64) for _ in range(2)]
    copies = [device.copy(device.empty(64), hosts[0]), device.copy(hosts[1], device.empty(64))]
    assert not any(copy.done() for copy in copies)
    device.finish()
    assert all(copy.done() for copy in copies)


def test_compute_follows_a_copy_that_it_awaits(lazy: None) -> None:
    device = LateAccelerator()
    host, there = device.host_buffer(64), device.empty(64)
    host.copy_(BYTES)
    device.await_copy(device.copy(there, host))
    assert torch.equal((there + 1).cpu(), BYTES + 1)


def test_a_stream_of_the_model_follows_the_one_before(lazy: None) -> None:
    device = LateAccelerator()
    there = device.empty(64)
    device.follow_compute()
    there.fill_(7)
    with torch.Stream(device.torch_device):
        device.follow_compute()
        assert ((there + 1).cpu() == 8).all()


def test_poison_of_a_thread_is_there_before_another_leases_the_buffer(lazy: None) -> None:
    device = LateAccelerator()
    pool = Pool(device.empty, {64: 1}, name="buffers", poison=device.poison)
    lease = pool.lease(64)

    def release() -> None:
        device.enter_thread()
        lease.release()

    helper = threading.Thread(target=release)
    helper.start()
    helper.join()
    with pool.lease(64) as own:
        values = own.tensor.fill_(7)
        assert (values.cpu() == 7).all()
        torch.accelerator.synchronize()
        assert (values.cpu() == 7).all()
        del values

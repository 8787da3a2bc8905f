"""Leases: returned once, poisoned, reused in the requested order, replaced while a view of them exists."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from infinity.errors import InfinityError, LifetimeError
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import host_tensor, storage_users
from infinity.tiers.pool import Pool


def pool(sizes: dict[int, int] | None = None, *, poison: bool = False, fifo: bool = False) -> Pool:
    fill = CpuDevice().poison if poison else None
    return Pool(host_tensor, sizes or {64: 2}, name="test", poison=fill, fifo=fifo)


def free(made: Pool) -> int:
    return sum(map(len, made._free.values()))


def test_a_lease_is_given_back_once() -> None:
    made = pool()
    lease = made.lease(64)
    lease.release()
    for misuse in (lease.release, lease.quarantine, lambda: lease.tensor, lambda: lease.storage):
        with pytest.raises(LifetimeError, match="after its release"):
            misuse()
    assert free(made) == 2


def test_a_block_releases_its_lease() -> None:
    made = pool({64: 1})
    with made.lease(64) as lease:
        assert made.try_lease(64) is None
    assert made.try_lease(64) is not None
    with pytest.raises(LifetimeError, match="after its release"):
        lease.release()


def test_a_block_releases_its_lease_after_an_error() -> None:
    made = pool({64: 1})
    with pytest.raises(ZeroDivisionError), made.lease(64):
        raise ZeroDivisionError
    assert made.try_lease(64) is not None


def test_a_detached_lease_outlives_its_block() -> None:
    """A detached lease is the same object, and its new owner may use a block of its own."""
    made = pool({64: 1})
    with made.lease(64) as lease:
        detached = lease.detach()
    assert detached is lease and made.try_lease(64) is None
    with detached:
        detached.tensor.fill_(1)
    assert made.try_lease(64) is not None


def test_a_lease_detached_before_an_error_stays_leased() -> None:
    made = pool({64: 1})
    with pytest.raises(ZeroDivisionError), made.lease(64) as lease:
        lease.detach()
        raise ZeroDivisionError
    assert made.try_lease(64) is None
    lease.release()
    assert made.try_lease(64) is not None


def test_a_lease_released_in_its_block_is_refused_at_the_end() -> None:
    made = pool({64: 1})
    with pytest.raises(LifetimeError, match="after its release"), made.lease(64) as lease:
        lease.release()
    for misuse in (lease.__enter__, lease.detach):
        with pytest.raises(LifetimeError, match="after its release"):
            misuse()
    assert made.try_lease(64) is not None and made.try_lease(64) is None


def test_a_lease_is_as_long_as_asked_for() -> None:
    made = pool({64: 1, 256: 1})
    small, large = made.lease(40), made.lease(100)
    assert (small.tensor.numel(), large.tensor.numel()) == (40, 100)
    assert small.flat(torch.float32).shape == (10,) and small.flat(torch.float32, 3).shape == (3,)
    assert made.try_lease(40) is None  # its class is empty; larger ones are others'
    with pytest.raises(InfinityError, match="no buffer of 257 bytes"):
        made.lease(257)
    assert made.nbytes == 320


def test_a_released_buffer_is_nan_in_every_format() -> None:
    made = pool(poison=True)
    lease = made.lease(64)
    view = lease.flat(torch.float32)
    view.fill_(1.0)
    lease.release()
    assert view.isnan().all()
    assert view.view(torch.bfloat16).isnan().all() and view.view(torch.float16).isnan().all()


@pytest.mark.parametrize("fifo", [True, False])
def test_the_order_of_reuse(fifo: bool) -> None:
    """First in, first out exposes lifetime errors that immediate reuse would hide."""
    made = pool({64: 3}, fifo=fifo)
    leases = [made.lease(64) for _ in range(3)]
    addresses = [lease.storage for lease in leases]
    for lease in leases:
        lease.release()
    again = [made.lease(64).storage for _ in range(3)]
    assert again == (addresses if fifo else addresses[::-1])


def test_a_buffer_that_is_still_referred_to() -> None:
    made = pool(poison=True)
    lease = made.lease(64)
    assert not lease.is_referenced()
    kept = lease.tensor[8:16]
    kept.fill_(3)
    assert lease.is_referenced() and not lease.is_referenced(beyond=1)
    lease.quarantine()
    assert free(made) == 2
    assert (kept == 3).all()
    others = [made.lease(64).storage for _ in range(2)]
    assert kept.untyped_storage().data_ptr() not in others


def test_detached_and_transposed_views_count() -> None:
    made = pool()
    lease = made.lease(64)
    before = storage_users(lease.tensor)
    views = [lease.tensor.view(8, 8).t(), lease.tensor.detach(), lease.flat(torch.int16)]
    assert storage_users(lease.tensor) == before + len(views)
    views.clear()
    assert not lease.is_referenced()


def test_a_kept_storage_counts() -> None:
    made = pool()
    lease = made.lease(64)
    kept = lease.tensor[8:16].untyped_storage()
    assert lease.is_referenced()
    del kept
    assert not lease.is_referenced()


def test_waiting_for_a_buffer() -> None:
    made = pool({64: 1})
    lease = made.lease(64)
    threading.Thread(target=lambda: (time.sleep(0.05), lease.release())).start()
    assert made.lease(64, timeout=10).nbytes == 64
    with pytest.raises(InfinityError, match="no buffer of 64 bytes was released"):
        made.lease(64, timeout=0.01)


def test_many_threads_share_a_pool() -> None:
    """No two threads hold one buffer at the same time."""
    made = pool({64: 3}, poison=True, fifo=True)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            lease = made.lease(64)
            lease.tensor.fill_(number)
            if not (lease.tensor == number).all():
                wrong.append(number)
            lease.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and free(made) == 3


def test_host_memory_is_of_exact_size_and_aligned() -> None:
    for nbytes in (0, 1, 5000, 3 << 20):
        memory = host_tensor(nbytes)
        assert memory.numel() == nbytes and memory.dtype == torch.uint8
        assert nbytes == 0 or (memory.data_ptr() % 4096 == 0 and not memory.any())


def test_one_thread_at_a_time_takes_buffers() -> None:
    """A thread that takes the last buffer locks out another one, which would see the buffer free and take it too."""
    made, took = pool({64: 1}), threading.Event()

    def take() -> None:
        assert made.try_lease(64) is None
        took.set()

    other = threading.Thread(target=take)
    with made._access:  # as another thread that is about to take the buffer it saw
        other.start()
        assert not took.wait(0.2)
        lease = made._take(64, 64)
    other.join(60)
    assert took.is_set() and lease is not None


def test_extra_buffers_are_freed_by_as_many_releases() -> None:
    made = pool({64: 1, 128: 1})
    leases = [made.lease(64), *(made.lease_extra(64, 2) for _ in range(3))]
    assert leases.pop() is None
    assert made.nbytes == 64 * 3 + 128 and made.leased == 3 and made.extra(50) == 2 and not made.extra(128)
    first, second, third = (lease for lease in leases if lease is not None)
    assert len({lease.storage for lease in (first, second, third)}) == 3
    first.release()
    kept = second.quarantine()  # replaced by no buffer
    assert made.nbytes == 64 + 128 and made.leased == 1 and free(made) == 1 and kept.numel() == 64
    third.release()
    assert made.nbytes == 64 + 128 and free(made) == 2 and not made.extra(64)


def test_an_extra_buffer_that_cannot_be_made_leaves_the_pool_as_it_was() -> None:
    made = pool({64: 1})

    def refuse(nbytes: int) -> torch.Tensor:
        raise MemoryError

    made._make = refuse
    with pytest.raises(MemoryError):
        made.lease_extra(64, 2)
    assert made.nbytes == 64 and not made.extra(64)


def test_one_thread_at_a_time_makes_extra_buffers() -> None:
    """Under a lock, of which another thread counts an extra buffer, and one takes back the count of a refused one."""
    made, counted, refused = pool({64: 1}), threading.Event(), threading.Event()

    def count() -> None:
        assert made.lease_extra(64, 1) is None
        counted.set()

    def refuse(nbytes: int) -> torch.Tensor:
        made._access.acquire()
        release.start()
        raise MemoryError

    def let_go() -> None:
        assert not refused.wait(0.2)
        made._access.release()

    other = threading.Thread(target=count)
    made.lease(64)
    with made._access:  # as another thread that is about to count the extra buffer
        other.start()
        assert not counted.wait(0.2)
        made._extra[64] += 1
    other.join(60)
    assert counted.is_set()
    made._extra[64] -= 1
    made._make, release = refuse, threading.Thread(target=let_go)
    with pytest.raises(MemoryError):
        made.lease_extra(64, 1)
    refused.set()
    release.join(60)
    assert not made.extra(64)


def test_views_of_parts_are_made_once_and_count_as_none() -> None:
    """They would show another unit's parameters after the lease."""
    made = pool()
    lease = made.lease(64)
    place = (2, 3), (3, 1), 4
    part = lease.part(torch.float32, place)
    assert lease.part(torch.float32, place) is part
    assert part.data_ptr() == lease.tensor.data_ptr() + 16 and part.shape == (2, 3)
    del part
    assert not lease.is_referenced()
    lease.substitute(host_tensor(64))
    assert lease.part(torch.float32, place).data_ptr() == lease.tensor.data_ptr() + 16

"""The late device is late, and shows each wait that is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import late

DEVICE = "late:0"
OTHER = "late:1"


def pinned(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value).pin_memory()


def outcomes(program: Callable[[], torch.Tensor], seeds: int = 10) -> list[bool]:
    """Return, for each seed, whether the program's result is finite."""
    results = []
    for seed in range(seeds):
        late.drain()
        late.set_mode("random")
        late.set_seed(seed)
        results.append(bool(program().isfinite().all()))
    return results


# ---- compute ----


def test_compute_is_late(lazy: None) -> None:
    x = torch.ones(4, device=DEVICE)
    y = (x * 3).sum()
    assert late.pending() > 2
    assert y.item() == 12
    assert late.pending() == 0


def test_fresh_and_freed_memory_is_poison(lazy: None) -> None:
    x = torch.empty(4, device=DEVICE)
    assert x.isnan().all()
    assert torch.empty(2, dtype=torch.int64, device=DEVICE).tolist() == [-1, -1]


def test_operators_have_the_cpus_results(order: None) -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0).to(device).view(3, 4)
        x[1:].mul_(2)
        x[:, 1] = 5
        mask = x > 6
        out = torch.empty(0, device=device)
        torch.add(x, 1, out=out)
        parts = torch.split(x, 2, dim=1)
        values, indices = x.topk(2)
        return [
            x, mask.nonzero(), x[mask], x[torch.tensor([2, 0])], out, parts[1].t(), values, indices, x.cumsum(1),
            torch.cat([x, out]), torch.where(mask, x, 0), x.to(torch.bfloat16).float(), x.std(), x.unique(),
            F.pad(x, (1, 1)), x.expand(2, 3, 4).contiguous(), torch.stack(torch._foreach_norm([x, out])),
            F.conv1d(x[None], x[:, None, :2], groups=3), x.sort(descending=True)[0], x.double() @ x.t().double(),
            torch.arange(5, device=device), torch.full((2,), 3, device=device), x.clamp(2, 7), x.softmax(-1),
        ]  # fmt: skip

    for there, here in zip(program(DEVICE), program("cpu"), strict=True):
        assert there.device.type == "late" and torch.equal(there.cpu(), here)


def test_random_numbers_are_the_cpus(order: None) -> None:
    def program(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.ones(8, device=device)
        return [torch.rand(4, device=device), F.dropout(x), x.normal_(), torch.randperm(9, device=device)]

    for there, here in zip(program(DEVICE), program("cpu"), strict=True):
        assert torch.equal(there.cpu(), here)


def test_numbers_of_the_host_are_captured_when_the_call_is_made(lazy: None) -> None:
    scale = torch.tensor(2.0)
    y = torch.ones(3, device=DEVICE) * scale
    scale.fill_(7)
    assert y.tolist() == [2, 2, 2]


def test_tensors_of_several_devices_are_refused(lazy: None) -> None:
    x = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device=OTHER)):
        with pytest.raises(RuntimeError, match="same device"):
            x + other


def test_an_error_in_queued_work_is_raised_by_the_next_wait(lazy: None) -> None:
    weight = torch.ones(3, 2, device=DEVICE)
    F.embedding(torch.tensor([99], device=DEVICE), weight)
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    assert weight.sum().item() == 6


def test_errors_of_shape_are_raised_by_the_call(lazy: None) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device=DEVICE) + torch.ones(2, device=DEVICE)


def test_outputs_are_those_of_each_calls_layouts(lazy: None) -> None:
    """Outputs are inferred once for equal calls. Calls that differ in strides, numbers, or shared memory do not."""
    for _ in range(2):
        x, counts = torch.ones(2, 3, device=DEVICE), torch.ones(3, dtype=torch.int64, device=DEVICE)
        assert (x + 1).stride() == (3, 1) and (torch.ones(3, 2, device=DEVICE).t() + 1).stride() == (1, 2)
        assert (counts + 1).dtype == torch.int64 and (counts + 1.0).dtype == torch.float32
        assert x.sum(0).shape == (3,) and x.sum(1).shape == (2,)
        assert torch.add(x, 1, out=torch.empty(0, device=DEVICE)).tolist() == [[2] * 3] * 2
        x[0, 1:].add_(torch.ones(3, device=DEVICE)[:-1])
        with pytest.raises(RuntimeError, match="single memory location"):
            counts[1:].add_(counts[:-1])
            late.drain()
        counts[1:].add_(torch.ones(3, dtype=torch.int64, device=DEVICE)[:-1])
        assert counts.tolist() == [1, 2, 2] and x.tolist() == [[1, 2, 2], [1, 1, 1]]


# ---- streams and events ----


def two_streams(wait: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
        with first:
            x = torch.ones(4, device=DEVICE)
            done = first.record_event()
        with second:
            if wait:
                second.wait_event(done)
            return (x * 2).cpu()

    return program


def test_a_missing_wait_between_streams_shows_and_an_event_fixes_it() -> None:
    assert not all(outcomes(two_streams(wait=False)))
    assert all(outcomes(two_streams(wait=True)))


def test_the_order_is_that_of_the_seed() -> None:
    assert outcomes(two_streams(wait=False)) == outcomes(two_streams(wait=False))


def test_queued_work_may_be_older_than_the_seed(lazy: None) -> None:
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    for seed in range(10):
        late.set_mode("lazy")
        with first:
            x = torch.ones(4, device=DEVICE)
        late.set_mode("eager")
        late.set_seed(seed)
        second.wait_stream(first)
        with second:
            assert (x * 2).tolist() == [2] * 4


def test_an_event_is_done_when_its_stream_has_reached_it(lazy: None) -> None:
    x = torch.ones(2, device=DEVICE)
    event = torch.Event(DEVICE, blocking=True)
    assert event.query()  # never recorded
    event.record()
    y = x * 2
    pending = late.pending()
    event.synchronize()
    assert event.query() and 0 < late.pending() < pending
    assert y.tolist() == [2, 2]


def test_polling_ends(order: None) -> None:
    x = torch.ones(2, device=DEVICE)
    event = torch.accelerator.current_stream().record_event()
    while not event.query():
        pass
    y = x * 2
    while not torch.accelerator.current_stream().query():
        pass
    assert late.pending() == 0 and y.tolist() == [2, 2]


def test_a_wait_for_an_event_is_for_its_record_before(lazy: None) -> None:
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    event = first.record_event()
    second.wait_event(event)
    with first:
        torch.ones(4, device=DEVICE)
        event.record(first)
    second.synchronize()
    assert late.pending() > 0 and not event.query()


def test_device_and_stream_are_each_threads_own(lazy: None) -> None:
    stream = torch.Stream(OTHER)
    seen = []

    def look() -> None:
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream().stream_id))

    with stream:
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream() == stream
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert seen == [(0, 0), (0, 0)]


def test_a_kernel_is_queued_on_its_tensors_device(lazy: None) -> None:
    x = torch.ones(2, device=OTHER)
    torch.accelerator.synchronize(0)
    assert late.pending() == 1
    torch.accelerator.synchronize(1)
    assert late.pending() == 0 and (x + 1).device == torch.device(OTHER)


def test_a_copy_between_devices_is_in_order_on_both(order: None) -> None:
    x = torch.full((4,), 3.0, device=DEVICE)
    y = torch.empty(4, device=OTHER)
    y.copy_(x * 2, non_blocking=True)
    assert (y + 1).tolist() == [7] * 4


# ---- copies ----


def test_a_host_buffer_that_is_read_early_is_poison(lazy: None) -> None:
    host = pinned(4)
    host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.tolist() == [1] * 4


def test_a_host_buffer_that_is_overwritten_early_shows(lazy: None) -> None:
    host = pinned(4, value=1)
    x = host.to(DEVICE, non_blocking=True)
    host.fill_(9)
    assert x.tolist() == [9] * 4


def test_host_memory_that_is_not_pinned_is_staged(lazy: None) -> None:
    host = torch.ones(4)
    x = host.to(DEVICE, non_blocking=True)
    host.fill_(9)
    assert late.pending() == 1 and x.tolist() == [1] * 4
    host.copy_(x + 1, non_blocking=True)
    assert host.tolist() == [2] * 4


def test_a_blocking_copy_waits(lazy: None) -> None:
    host = pinned(4, value=1)
    x = host.to(DEVICE)
    assert late.pending() == 0
    host.copy_(x * 2)
    assert host.tolist() == [2] * 4


def test_a_buffer_that_a_queued_copy_reads_is_not_poisoned(order: None) -> None:
    host, other = pinned(4, value=1), torch.full((4,), 5.0, device=DEVICE)
    x = host.to(DEVICE, non_blocking=True)
    host.copy_(other, non_blocking=True)  # after the copy above, in the order of the stream
    assert x.tolist() == [1] * 4 and host.tolist() == [5] * 4


def test_registered_memory_counts_as_pinned(lazy: None) -> None:
    host = torch.ones(8)
    assert not host.is_pinned()
    late.pin(host.data_ptr(), 32)
    assert host[3:].is_pinned()
    x = host.to(DEVICE, non_blocking=True)
    with pytest.raises(RuntimeError, match="queued copies"):
        late.unpin(host.data_ptr())
    assert x.sum().item() == 8 and not host.is_pinned()


def test_pinned_memory_outlives_copies_that_are_queued(order: None) -> None:
    x = pinned(1000, value=3).to(DEVICE, non_blocking=True)
    assert x.sum().item() == 3000


# ---- memory ----


def test_a_queued_kernel_is_no_user_of_a_storage(lazy: None) -> None:
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    storage = x.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    y.add_(x)
    assert torch._C._storage_Use_Count(storage._cdata) == before and late.pending() > 0


def freed_on_another_stream(recorded: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        side = torch.Stream(DEVICE)
        x = torch.ones(4, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        if recorded:
            x.record_stream(side)
        del x
        return y.to("cpu") if not side.synchronize() else y

    return program


def test_memory_freed_before_another_stream_used_it_shows() -> None:
    assert not all(outcomes(freed_on_another_stream(recorded=False)))
    assert all(outcomes(freed_on_another_stream(recorded=True)))


def test_a_write_into_freed_memory_is_an_error(lazy: None) -> None:
    side = torch.Stream(DEVICE)
    x = torch.ones(4, device=DEVICE)
    with side:
        x.fill_(3)
    del x
    torch.accelerator.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="after this was freed"):
        side.synchronize()


def test_memory_is_counted(lazy: None) -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, device=DEVICE)
    assert torch.accelerator.memory_allocated() == before + 4000
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 4000


def test_views_and_assigned_data_share_memory(order: None) -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.data = memory[16:32].view(torch.float32)
    assert parameter.device.type == "late" and parameter.data_ptr() == memory.data_ptr() + 16
    memory.view(torch.float32)[4:8].fill_(3)
    (parameter * 2).sum().backward()
    assert parameter.tolist() == [3] * 4 and parameter.grad is not None and parameter.grad.tolist() == [2] * 4
    parameter.data = torch.empty(0)
    assert parameter.device.type == "cpu"


def test_a_resized_storage_keeps_its_bytes(order: None) -> None:
    x = torch.ones(4, device=DEVICE)
    x.untyped_storage().resize_(32)
    x.resize_(8)[4:] = 2
    assert x.tolist() == [1] * 4 + [2] * 4
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0

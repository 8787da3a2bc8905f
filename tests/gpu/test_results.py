"""Results that a device computes for the host, beside copies of gradients."""

from __future__ import annotations

import pytest
import torch

from infinity.tiers.accelerator import StreamTransfer
from support.accelerator import accelerator, delay, device, engine_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(accelerator() is None, reason="there is no accelerator here"),
]


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("nbytes", [1, 8, 5000])
def test_a_result_is_that_of_the_compute_before(pin: bool, nbytes: int) -> None:
    ours = engine_device()
    host = ours.host_buffer(nbytes + 3, pin=pin)
    values = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    delay()
    values += torch.arange(1, nbytes + 1, device=device())
    ours.copy_result(host[3:], values).wait()
    assert torch.equal(host[3:], torch.arange(1, nbytes + 1).to(torch.uint8)) and not host[:3].any()


def test_a_result_does_not_wait_for_copies_to_the_host() -> None:
    """A copy that was queued earlier cannot begin yet."""
    ours, busy = engine_device(), torch.Stream(device())
    large, host = ours.empty(1 << 20).fill_(7), ours.host_buffer(1 << 20)
    result, flag = torch.ones(1, dtype=torch.uint8, device=device()), ours.host_buffer(1)
    ours.copy_result(flag, result).wait()  # loads kernels, which may wait for the device
    flag.zero_()
    busy.wait_stream(torch.accelerator.current_stream())
    with busy:
        if device().type == "cuda":
            torch.cuda._sleep(500_000_000)
        begins = StreamTransfer(busy)
    copy = ours.copy(host, large, after=begins)
    ours.copy_result(flag, result).wait()
    if device().type == "cuda":  # work of "late" may run before anything waits for it
        assert not copy.done()
    copy.wait()
    assert flag.item() == 1 and (host == 7).all()

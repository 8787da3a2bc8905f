"""A communicator that is closed leaves its groups."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from infinity.comm.communicator import Communicator
from infinity.tiers.device import CpuDevice


def test_closing_waits_for_the_collective_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks, leaving = Communicator(CpuDevice()), threading.Event()
    leave = ranks._leave

    def watched() -> None:
        leaving.set()
        leave()

    monkeypatch.setattr(ranks, "_leave", watched)
    left_before_its_end = ranks._thread.submit(leaving.wait, 0.3)
    ranks.close()
    assert leaving.is_set() and not left_before_its_end.result()

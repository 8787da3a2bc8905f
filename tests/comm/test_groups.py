"""Process groups: the backend of a device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from infinity.comm.groups import backend_of


@pytest.mark.parametrize("name", [None, "gloo", "cpu:gloo"])
def test_backend_is_the_one_that_serves_the_device(name: str | None) -> None:
    """A group's own name may be "undefined" or list several backends."""
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert backend_of(group, torch.device("cpu")) == "gloo"
    finally:
        dist.destroy_process_group()

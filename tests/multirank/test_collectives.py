"""Collectives of `Communicator` start when the memory that they exchange is valid."""

from __future__ import annotations

import pytest
import torch

from multirank import pair_cases
from support.ranks import Group


@pytest.mark.parametrize("what, sharded", [("gather", True), ("reduce", True), ("reduce", False)])
def test_a_collective_waits_for_its_memory(pair: Group, what: str, sharded: bool) -> None:
    """Collectives exchange the data of the preceding transfer and of compute, even if these end late."""
    found, waited = zip(*pair.run(pair_cases.late, what=what, sharded=sharded), strict=True)
    assert all(waited)
    whole = torch.arange(float(found[0].numel() * (pair.size if what == "reduce" and sharded else 1)))
    for rank, flat in enumerate(found):
        total = whole * (pair.size if what == "reduce" else 1)
        own = total.chunk(pair.size)[rank] if what == "reduce" and sharded else total
        assert torch.equal(flat, own)

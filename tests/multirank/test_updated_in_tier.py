"""Units that ranks update in host memory alone equal a plain loop, and are not copied up before their next use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multirank import kept_cases, updated_cases
from support.beside import assert_like
from support.ranks import Group

PREFETCH = pytest.mark.parametrize("prefetch_bytes", [0, 16384])


def trained(pair: Group, *, probes: bool = False, **options: Any) -> list[dict[str, Any]]:
    """Train on two ranks, and compare with a plain loop and with a device whose copies are not late."""
    found = pair.run(updated_cases.training, probes=probes, **options)
    expected = kept_cases.plain(2, story="nothing", make=lambda: updated_cases.Holding(probes=probes))
    assert_like([list(losses) for losses in zip(*(one["losses"] for one in found), strict=True)], expected["losses"])
    on_cpu = pair.run(updated_cases.training, probes=probes, late=False, **options)
    for one, other in zip(found, on_cpu, strict=True):
        assert_like(one["values"], expected["values"])
        assert all(torch.equal(other["values"][name], value) for name, value in one["values"].items())
    assert found[0]["gathers"] == found[1]["gathers"]
    return found


@PREFETCH
def test_a_unit_that_leaves_before_its_next_use_is_not_copied_up_again(pair: Group, prefetch_bytes: int) -> None:
    first, second = trained(pair, prefetch_bytes=prefetch_bytes)
    assert first["early"] == second["early"] and len(first["early"][-1]) == 5
    for one in (first, second):
        assert 0 < max(one["ups"][2:]) <= one["buffers"] < 6  # of the first two steps, only the second has a trace


@PREFETCH
@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("holds", ["graphs", "views"])
@pytest.mark.parametrize("probes", [False, True])
def test_ranks_may_refer_to_different_units(
    pair: Group, probes: bool, holds: str, holder: int, prefetch_bytes: int
) -> None:
    """A rank with graphs updates units at the end of the step, and its buffers are free when those of others are."""
    found = trained(pair, holds=holds, holder=holder, prefetch_bytes=prefetch_bytes, probes=probes)
    late = {unit for step in found[holder]["early"][2:] for unit in step}
    others = {unit for step in found[1 - holder]["early"][2:] for unit in step}
    assert others >= ({4} if probes else {1, 2, 3, 4, 5})
    assert (late < others) if holds == "graphs" else (late == others)

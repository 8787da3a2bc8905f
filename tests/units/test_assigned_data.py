"""Data assigned between forward and backward is refused if backward needs the former values."""

from __future__ import annotations

import pytest
import torch

from conftest import OpenEngine
from infinity.errors import LifetimeError
from infinity.units.released import is_released
from support.loops import parameters_of, train
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(4)


@pytest.mark.parametrize("placement", ["none", "nvme"])
@pytest.mark.parametrize("prefetch", [0, "auto"])
def test_data_that_backward_needs_as_it_was(placement: str, prefetch: int | str, make_engine: OpenEngine) -> None:
    """Linear layers save a view of their weight, whose memory plain PyTorch keeps; the new data counts afterwards."""
    options = {"param": placement, "optim": placement, "prefetch_bytes": prefetch, "unit_size": 4096}
    engine = make_engine(seeded(Linears), update="next_forward", **options)
    train(engine, BATCHES[:2])
    loss = engine(*BATCHES[2])
    weight = engine.module.layers[5].weight
    assigned = torch.full_like(weight.detach(), 0.01)
    weight.data = assigned.clone()
    with pytest.raises(LifetimeError, match=r"layers\.5\.weight\.data was assigned between forward and backward"):
        engine.backward(loss)
    del loss
    assert torch.equal(weight.detach(), assigned)
    train(engine, BATCHES[2:])


def test_data_that_is_refused_leaves_the_parameter_guarded(make_engine: OpenEngine) -> None:
    """A parameter whose assigned data was refused still fetches its unit, with the former values."""
    engine = make_engine(seeded(Linears), param="none", optim="none", unit_size=4096)
    train(engine, BATCHES[:2])
    before = parameters_of(engine)["layers.5.weight"]
    weight = engine.module.layers[5].weight
    weight.data = torch.zeros(3, 3)
    with pytest.raises(LifetimeError, match=r"shape \[3, 3\]"):
        engine.settle()
    assert is_released(weight)
    assert torch.equal(weight.detach(), before)

"""A unit's residency: the table of moves, placeholders, edits and what counts as a view."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from infinity.errors import LifetimeError, ResidencyError
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.units.layout import layout_unit
from infinity.units.unit import TRANSITIONS, Residency, Unit, placeholder

ALLOWED = """
RELEASED FETCHING, FETCHING RESIDENT, FETCHING RELEASED, RESIDENT RELEASED, FETCHING UPDATING, RESIDENT UPDATING,
RELEASED UPDATING, UPDATING FETCHING, UPDATING RELEASED
"""


def make() -> tuple[Unit, Pool]:
    parameters = [nn.Parameter(torch.full((4, 3), 2.0)), nn.Parameter(torch.full((5,), 3.0))]
    layout = layout_unit(0, "unit", [("a", (4, 3), 0), ("b", (5,), 0)], torch.float32, True, 1)
    unit = Unit(layout, parameters, torch.device("cpu"))
    unit.unbind()
    return unit, Pool(host_tensor, {layout.nbytes: 2}, name="units", poison=True, fifo=True)


def bound() -> tuple[Unit, Pool]:
    unit, pool = make()
    unit.lease = pool.lease(unit.layout.nbytes)
    unit.flat().fill_(7.0)
    unit.bind()
    return unit, pool


def test_the_table_of_moves() -> None:
    """Every pair of residencies, allowed or refused; the reader's table above is the code's."""
    allowed = {tuple(move.split()) for move in ALLOWED.replace("\n", " ").split(",")}
    assert {(a.name, b.name) for a, b in TRANSITIONS} == allowed
    for before, after in product(Residency, Residency):
        unit, _ = make()
        unit.residency = before
        if (before.name, after.name) in allowed:
            unit.move(after)
            assert unit.residency is after
        else:
            with pytest.raises(ResidencyError, match=f"cannot go from {before.name} to {after.name}"):
                unit.move(after)
            assert unit.residency is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_placeholder_has_shape_and_dtype_and_no_memory(dtype: torch.dtype) -> None:
    shown = placeholder((1000, 1000), dtype, torch.device("cpu"))
    assert shown.shape == (1000, 1000) and shown.dtype == dtype and shown.stride() == (0, 0)
    assert shown.untyped_storage().nbytes() == dtype.itemsize
    assert shown.isnan().all()


def test_parameters_are_views_of_the_buffer_while_bound() -> None:
    unit, _ = bound()
    a, b = unit.parameters
    assert (a == 7.0).all() and a.shape == (4, 3) and b.shape == (5,)
    unit.flat()[unit.layout.slots[1].offset] = 9.0
    assert b[0] == 9.0
    assert not unit.edited() and not unit.is_viewed()
    unit.unbind()
    assert a.isnan().all() and a.shape == (4, 3) and b.isnan().all()
    unit.check_placeholders()


def test_what_counts_as_an_edit() -> None:
    unit, _ = bound()
    with torch.no_grad():
        unit.parameters[0].add_(1)
    assert unit.edited()
    unit, _ = bound()
    unit.parameters[1].data = torch.arange(5.0)
    assert unit.edited()
    slot = unit.layout.slots[1]
    assert torch.equal(unit.flat()[slot.offset : slot.stop], torch.arange(5.0))
    assert unit.parameters[1].data_ptr() == unit.flat()[slot.offset :].data_ptr()


def test_what_counts_as_a_view() -> None:
    unit, _ = bound()
    view = unit.parameters[0].t()
    assert unit.is_viewed()
    del view
    assert not unit.is_viewed()
    kept = unit.parameters[0]
    assert not unit.is_viewed()  # the parameter itself is no view, unless code was lent it
    unit.lent = True
    assert unit.is_lent() and unit.is_viewed()
    del kept
    assert not unit.is_lent()
    loss = (unit.parameters[0] * torch.ones(4, 3)).sum()
    assert not unit.is_lent()  # a graph refers to the parameter, and does not count
    del loss


def test_a_unit_that_lingers() -> None:
    """Its parameters stay what they were until it is bound or updated."""
    unit, pool = bound()
    kept = unit.parameters[0]
    unit.lent = True
    unit.linger()
    assert unit.lingers and unit.lease is not None
    unit.lease.quarantine()
    assert (kept == 7.0).all()
    unit.check_placeholders()
    with torch.no_grad():
        kept.add_(1)
    with pytest.raises(LifetimeError, match="a was changed while its unit was released"):
        unit.check_placeholders()
    assert kept.isnan().all() and not unit.lingers
    unit.lease = pool.lease(unit.layout.nbytes)
    unit.flat().fill_(5.0)
    unit.bind()
    assert (kept == 5.0).all()


def test_steps_are_counted_by_slot() -> None:
    unit, _ = make()
    assert unit.advance({0}) == {0: 1}
    assert unit.advance({0, 1}) == {0: 2, 1: 1}
    assert unit.steps == [2, 1]

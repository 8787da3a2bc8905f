"""A unit's residency: the table of transitions, placeholders, edits, and the definition of a view."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from infinity.errors import LifetimeError, ResidencyError, UsageError
from infinity.observe.recorder import Recorder
from infinity.plan.layout import Member, layout_unit
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.units import binding
from infinity.units.released import is_released
from infinity.units.unit import TRANSITIONS, Moves, Residency, Unit, placeholder
from infinity.update.job import UpdateProgress

ALLOWED = """
RELEASED FETCHING, FETCHING RESIDENT, FETCHING RELEASED, RESIDENT RELEASED, FETCHING UPDATING, RESIDENT UPDATING,
RELEASED UPDATING, UPDATING FETCHING, UPDATING RELEASED
"""


def make() -> tuple[Unit, Pool]:
    parameters = [nn.Parameter(torch.full((4, 3), 2.0)), nn.Parameter(torch.full((5,), 3.0))]
    layout = layout_unit(0, "unit", [Member("a", (4, 3), 0), Member("b", (5,), 0)], torch.float32, True, 1)
    unit = Unit(layout, parameters, torch.device("cpu"))
    binding.unbind(unit)
    return unit, Pool(host_tensor, {layout.nbytes: 2}, name="units", poison=CpuDevice().poison, fifo=True)


def bound() -> tuple[Unit, Pool]:
    unit, pool = make()
    unit.lease = pool.lease(unit.layout.nbytes)
    unit.flat().fill_(7.0)
    binding.bind(unit)
    return unit, pool


def test_the_table_of_moves() -> None:
    """Every pair of residencies is allowed or refused; the table above, for readers, equals the code's."""
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


def test_the_error_of_an_update_stops_the_engine_where_it_is_awaited() -> None:
    """Also of one that has ended. An error of the user's code does not."""
    moves, update = Moves(Recorder()), UpdateProgress()
    with pytest.raises(UsageError), moves.moving():
        raise UsageError("an edit")
    assert moves.failure is None
    update.fail(OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"), moves.moving():
        moves.await_update(update)
    assert isinstance(moves.failure, OSError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_placeholder_has_shape_and_dtype_and_no_memory(dtype: torch.dtype) -> None:
    shown = placeholder((1000, 1000), dtype, torch.device("cpu"))
    assert shown.shape == (1000, 1000) and shown.dtype == dtype and shown.stride() == (0, 0)
    assert shown.untyped_storage().nbytes() == dtype.itemsize
    assert shown.isnan().all()


def test_parameters_are_views_of_the_buffer_while_bound() -> None:
    unit, _ = bound()
    a, b = unit.parameters
    assert type(a) is nn.Parameter
    assert (a == 7.0).all() and a.shape == (4, 3) and b.shape == (5,)
    unit.flat()[unit.layout.slots[1].offset] = 9.0
    assert b[0] == 9.0
    assert not unit.is_viewed()
    binding.unbind(unit)
    assert is_released(a) and isinstance(a, nn.Parameter) and a.shape == (4, 3)
    with pytest.raises(UsageError, match=r"shape \[4, 3\].*closed"):
        a.isnan()  # nobody owns it


def test_assigned_data_is_taken_over() -> None:
    unit, _ = bound()
    unit.parameters[1].data = torch.arange(5.0)
    binding.adopt_assigned(unit, Recorder())
    slot = unit.layout.slots[1]
    assert torch.equal(unit.flat()[slot.offset : slot.stop], torch.arange(5.0))
    assert unit.parameters[1].data_ptr() == unit.flat()[slot.offset :].data_ptr()
    unit.parameters[1].data = torch.arange(6.0)
    with pytest.raises(LifetimeError, match=r"b was given data of shape \[6\]"):
        binding.adopt_assigned(unit, Recorder())


def test_what_counts_as_a_view() -> None:
    unit, _ = bound()
    view = unit.parameters[0].t()
    assert unit.is_viewed()
    del view
    assert not unit.is_viewed()
    kept = unit.parameters[0]
    assert not unit.is_viewed()  # the parameter itself is no view
    loss = (kept * torch.ones(4, 3)).sum()
    assert not unit.is_viewed()
    del loss


def test_steps_are_counted_by_slot() -> None:
    unit, _ = make()
    assert unit.advance({0}) == {0: 1}
    assert unit.advance({0, 1}) == {0: 2, 1: 1}
    assert unit.steps == [2, 1]

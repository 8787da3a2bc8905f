"""Advice on host memory that runs out: the estimate of what a forward takes, and the changes that can help."""

from __future__ import annotations

import pytest
import torch

from infinity.config import Config
from infinity.engine.budget import plan_units
from infinity.observe.log import logger
from infinity.plan.budget import Budget
from infinity.plan.policy import RankInfo
from infinity.tiers import headroom
from infinity.tiers.device import CpuDevice
from infinity.tiers.headroom import Headroom, Pass, Planned, Use, warning

MIB = 1 << 20


def use(unit: str, done: int = 0, *, cycle: int = 1, within: Pass = Pass.FORWARD) -> Use:
    return Use(unit, cycle, done, within)


class Machine:
    """A process whose memory the test sets, in MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident = self.left = 1000
        monkeypatch.setattr(headroom, "_resident", lambda: self.resident * MIB)
        monkeypatch.setattr(headroom, "available_memory", lambda: self.left * MIB)
        monkeypatch.setattr(logger, "propagate", True)

    def take(self, mebibytes: int) -> None:
        self.resident += mebibytes
        self.left -= mebibytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("within", "planned", "estimate"),
    [
        (Pass.FORWARD, Planned(14), "needs about 460 MB more if the 11 units left take as much"),
        (Pass.FORWARD, Planned(4), "needs about 42 MB more if the last unit takes as much"),
        (Pass.BACKWARD, Planned(14), None),
        (Pass.WITHOUT_GRAPH, Planned(14), None),
        (Pass.FORWARD, Planned(14, saves_on_nvme=True), None),
    ],
)
def test_the_units_of_a_forward_give_an_estimate_of_those_left(
    within: Pass, planned: Planned, estimate: str | None, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The forward keeps activations in memory. The first unit, an embedding or imports, does not count."""
    machine.left = 160
    found = Headroom(planned)
    for done, taken in enumerate((0, 40, 30, 50)):
        machine.take(taken)
        found.look(use(str(done), done, within=within))
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("host memory: 41.94 MB are left before unit 3. The model has just taken 52.43 MB")
    assert estimate in text if estimate else "more if" not in text


def test_memory_of_a_former_step_that_is_used_again_does_not_lower_the_estimate(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    found = Headroom(Planned(11))
    for cycle, done, resident, left in ((1, 0, 1000, 900), (1, 8, 1200, 700), (2, 0, 1100, 800), (2, 5, 1200, 60)):
        machine.resident, machine.left = resident, left
        found.look(use("a", done, cycle=cycle))
    assert not caplog.records
    machine.take(40)
    found.look(use("b", 6, cycle=2))  # 40 MiB a unit; 140 MiB of the six units from the first on would be 23
    assert "needs about 210 MB more if the 5 units left take as much" in caplog.text


@pytest.mark.parametrize("units", [1, 14])
def test_a_first_unit_gives_no_estimate(units: int, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A unit that is used again, as by a loop over tied ones, is no further unit."""
    machine.left = 60
    found = Headroom(Planned(units, largest=16 * MIB, buffers=999 * MIB))
    found.look(use("a"))
    machine.take(40)
    found.look(use("a", min(1, units - 1)))
    assert "before unit a. The model has just taken 41.94 MB. If" in caplog.text
    assert "unit_size" not in caplog.text


SMALLER_UNITS = 'infinity.unit_size to "4MiB" for smaller buffers (the largest unit has 14.68 MB)'
NVME = 'infinity.activations.device to "nvme"'


@pytest.mark.parametrize(
    ("more", "smaller_units", "nvme"), [(508, False, True), (140, False, False), (70, True, False)]
)
def test_smaller_units_are_advised_if_their_buffers_hold_the_estimate(
    more: int, smaller_units: bool, nvme: bool
) -> None:
    """With a margin: halved units free a part of their buffers, and a loss follows. Files need memory of their own."""
    planned = Planned(14, largest=14 * MIB, buffers=424_000_000)
    text = warning(use("h.2", 3), 33 * MIB, 46 * MIB, more * 10**6, planned)
    assert (SMALLER_UNITS in text, NVME in text) == (smaller_units, nvme)
    assert ". Lower the micro-batch, shorten the sequences" in text and "checkpoint activations (torch.utils" in text
    assert SMALLER_UNITS not in warning(use("h.2", 3), 0, 46 * MIB, 10**6, Planned(14, 0, 424_000_000))


def test_a_backward_is_advised_by_what_it_has_just_taken() -> None:
    planned = Planned(14, largest=14 * MIB, buffers=424_000_000)
    for taken, smaller_units in ((60, True), (200, False)):
        text = warning(use("h.2", 13, within=Pass.BACKWARD), 33 * MIB, taken * MIB, None, planned)
        assert (SMALLER_UNITS in text) is smaller_units
        assert f"or if activations take several hundred MB, set {NVME}." in text and "mostly activations" not in text


def test_an_evaluation_has_no_activations_to_move() -> None:
    text = warning(use("a", 3, within=Pass.WITHOUT_GRAPH), 0, MIB, None, Planned(14))
    assert ". Lower the micro-batch or shorten the sequences." in text and "activations" not in text


@pytest.mark.parametrize(("spare", "is_announced"), [(0, False), (-1, True)])
def test_what_backward_takes_has_to_be_left_in_a_forward(
    spare: int, is_announced: bool, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Two gradients of the largest parameter, beside as much as the last unit took and 16 MiB."""
    machine.left = 20 + 20 + 16 + 2 * 100 + spare
    found = Headroom(Planned(14, gradient=100 * MIB))
    found.look(use("a"))
    machine.take(20)
    found.look(use("b", 1))
    said = (
        "The model has just taken 20.97 MB. The loss and backward take more: the largest gradient alone has 105 MB. If"
    )
    assert (said in caplog.text) is is_announced


def test_what_backward_takes_is_not_left_again_in_backward(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.left = 60
    found = Headroom(Planned(14, gradient=100 * MIB))
    found.look(use("a", within=Pass.BACKWARD))
    machine.take(20)
    found.look(use("b", 1, within=Pass.BACKWARD))
    assert not caplog.records


@pytest.mark.parametrize("frozen", [False, True])
def test_the_largest_gradient_is_that_of_a_trained_parameter(frozen: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(not frozen)
    config = Config.load({"train_batch_size": 1, "bf16": {"enabled": True}})
    groups = [{"params": [*model.parameters()]}]
    plan = plan_units(model, config, groups, RankInfo(), CpuDevice().info, Budget())[1]
    assert Planned.of(plan).gradient == (2 * 64 if frozen else 2 * 8000)

"""Advice on host memory that runs out: the estimate of what a forward takes, and the changes that can help."""

from __future__ import annotations

from itertools import product

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
LAST_UNIT = "The unit before took 52.43 MB, mostly activations:"


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
        (
            Pass.FORWARD,
            Planned(14),
            "The unit before took 52.43 MB, mostly activations: the 11 left take about 577 MB if each",
        ),
        (
            Pass.FORWARD,
            Planned(4),
            "The unit before took 52.43 MB, mostly activations: the last one takes about 52.43 MB if each",
        ),
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
    assert text.startswith(
        f"host memory: 41.94 MB are left before unit 3. {estimate or 'The model has just taken 52.43 MB'}"
    )


def test_memory_of_a_former_step_that_is_used_again_does_not_lower_the_estimate(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    found = Headroom(Planned(11))
    for cycle, done, resident, left in ((1, 0, 1000, 900), (1, 8, 1200, 700), (2, 0, 1100, 800), (2, 4, 1200, 60)):
        machine.resident, machine.left = resident, left
        found.look(use("a", done, cycle=cycle))
    assert not caplog.records
    machine.take(40)
    found.look(use("b", 6, cycle=2))  # 20 MiB a unit; 140 MiB of the six units from the first on would be 23
    assert "The 2 units before took 41.94 MB, mostly activations: the 5 left take about 105 MB" in caplog.text


@pytest.mark.parametrize("units", [1, 14])
def test_a_first_unit_gives_no_estimate(units: int, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A unit that is used again, as by a loop over tied ones, is no further unit."""
    machine.left = 60
    found = Headroom(Planned(units))
    found.look(use("a"))
    machine.take(40)
    found.look(use("a", min(1, units - 1)))
    assert "before unit a. The model has just taken 41.94 MB. If" in caplog.text


def test_changes_are_left_to_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller micro-batch or checkpointed blocks, advised without one, ended in killed processes."""
    monkeypatch.setattr(headroom, "total_memory", lambda: 700 * MIB + 1)
    monkeypatch.setattr(headroom, "available_memory", lambda: 200 * MIB)
    monkeypatch.setattr(headroom, "_resident", lambda: 300 * MIB)
    for within, (limit, nbytes) in product(Pass, (("ulimit -d", 700), ("", 500))):
        monkeypatch.setattr(headroom, "memory_limit", lambda name=limit: (name, 0))
        text = warning(use("a", 3, within=within), 33 * MIB, (46 * MIB, 2), Planned(14))
        assert f" --config FILE --host-memory {nbytes}MiB" in text and "exit status 137" in text
        assert not [word for word in ("micro-batch", "checkpoint", "unit_size", "nvme") if word in text]


@pytest.mark.parametrize(("resident", "left"), [(300, 200), (600, 100)])
def test_room_counts_as_a_prediction_does(resident: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may not count pages of library files that others have read, and infinity plan counts them."""
    monkeypatch.setattr(headroom, "total_memory", lambda: 700 * MIB)
    monkeypatch.setattr(headroom, "available_memory", lambda: 200 * MIB)
    monkeypatch.setattr(headroom, "_resident", lambda: resident * MIB)
    assert headroom.room() == (left * MIB - headroom.PROCESS, 200 * MIB - headroom.PROCESS)


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

"""The warning before host memory runs out: what it states, and the prediction that it names."""

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


def use(unit: str, *, within: Pass = Pass.FORWARD) -> Use:
    return Use(unit, 1, within)


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


@pytest.mark.parametrize("within", Pass)
def test_the_warning_states_what_was_taken_and_estimates_nothing(
    within: Pass, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Light and heavy units follow each other, and the first ones touch memory for the engine."""
    machine.left = 160
    found = Headroom()
    for unit, taken in enumerate((0, 40, 30, 50)):
        machine.take(taken)
        found.look(use(str(unit), within=within))
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(
        "host memory: 41.94 MB are left before unit 3, and the model has just taken 52.43 MB. If memory runs out, "
    )
    said, _, _ = text.partition("infinity plan")
    assert " units " not in said and "activations" not in said


def test_changes_are_left_to_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller micro-batch or checkpointed blocks, advised without one, ended in killed processes."""
    monkeypatch.setattr(headroom, "total_memory", lambda: 700 * MIB + 1)
    monkeypatch.setattr(headroom, "available_memory", lambda: 200 * MIB)
    monkeypatch.setattr(headroom, "_resident", lambda: 300 * MIB)
    for within, (limit, nbytes) in product(Pass, (("ulimit -d", 700), ("", 500))):
        monkeypatch.setattr(headroom, "memory_limit", lambda name=limit: (name, 0))
        text = warning(use("a", within=within), 33 * MIB, 46 * MIB, Planned())
        assert f" --config FILE --host-memory {nbytes}MiB" in text and "exit status 137" in text
        said, _, _ = text.partition("infinity plan")
        assert not [word for word in ("micro-batch", "checkpoint", "unit_size", "nvme") if word in said]


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
    found = Headroom(Planned(gradient=100 * MIB))
    found.look(use("a"))
    machine.take(20)
    found.look(use("b"))
    said = (
        "the model has just taken 20.97 MB. The loss and backward take more: the largest gradient alone has 105 MB. If"
    )
    assert (said in caplog.text) is is_announced


def test_what_backward_takes_is_not_left_again_in_backward(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.left = 60
    found = Headroom(Planned(gradient=100 * MIB))
    found.look(use("a", within=Pass.BACKWARD))
    machine.take(20)
    found.look(use("b", within=Pass.BACKWARD))
    assert not caplog.records


@pytest.mark.parametrize("frozen", [False, True])
def test_the_largest_gradient_is_that_of_a_trained_parameter(frozen: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(not frozen)
    config = Config.load({"train_batch_size": 1, "bf16": {"enabled": True}})
    groups = [{"params": [*model.parameters()]}]
    plan = plan_units(model, config, groups, RankInfo(), CpuDevice().info, Budget())[1]
    assert Planned.of(plan).gradient == (2 * 64 if frozen else 2 * 8000)

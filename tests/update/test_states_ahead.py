"""Optimizer states that are read as backward ends: in time for step(), and never used after a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import NonFiniteError, UsageError
from infinity.tiers.read_ahead import WindowsAhead
from support.configs import engine_config
from support.late_disk import use_late_disks
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine, parameters_of
from support.models import VOCABULARY, Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(16)


class Reordered(Stack):
    """Calls its blocks in `order`, which a test changes."""

    def __init__(self) -> None:
        super().__init__(width=32, depth=4)
        self.order = [0, 1, 2, 3]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return F.cross_entropy(self.head(x).float().view(-1, VOCABULARY), targets.flatten())


class Loop:
    """A training loop whose events may come in any order. Calls that the phase of the step forbids do nothing."""

    def __init__(self, engine: TrainingEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.model: Any = engine.module
        self.saved: dict[str, Any] | None = None
        self.losses: list[float] = []

    def run(self, event: str) -> None:
        try:
            getattr(self, event)()
        except UsageError as error:
            self.losses.append(float(len(str(error))))  # the same refusals on all tiers

    def backward(self) -> None:
        loss = self.engine(*BATCHES[len(self.losses) % len(BATCHES)])
        self.losses.append(loss.item())
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def unsynced(self) -> None:
        with self.engine.no_sync():
            self.backward()

    def drop(self) -> None:
        self.engine.drop_gradients()

    def fail(self) -> None:
        """Run a backward that an exception cuts short."""
        loss = self.engine(*BATCHES[0])
        hook = self.model.blocks[0].down.weight.register_hook(_raise)
        try:
            self.engine.backward(loss)
        except ZeroDivisionError:
            pass
        finally:
            hook.remove()

    def overflow(self) -> None:
        loss = self.engine(*BATCHES[0])
        try:
            self.engine.backward(loss * float("inf"))
            self.engine.step()
        except NonFiniteError:
            pass

    def edit(self) -> None:
        with infinity.GatheredParameters(self.model.blocks[0].up.weight, modifier_rank=0), torch.no_grad():
            self.model.blocks[0].up.weight.mul_(1.5)

    def set_states(self) -> None:
        """Replace a moment and a master of the first units."""
        moment, master = self.model.embedding.weight, self.model.blocks[0].up.weight
        infinity.set_full_optimizer_state(moment, torch.full(moment.shape, 1e-3), "exp_avg")
        infinity.set_full_fp32_param(master, torch.full(master.shape, 0.01))

    def edit_in_place(self) -> None:
        with torch.no_grad():
            self.model.embedding.weight.add_(0.25)

    def keep(self) -> None:
        state = self.engine.optimizer.state_dict()
        self.saved = {
            "state": {key: {n: _copy(value) for n, value in each.items()} for key, each in state["state"].items()},
            "param_groups": state["param_groups"],
        }

    def load(self) -> None:
        if self.saved is not None:
            self.engine.optimizer.load_state_dict(self.saved)

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="one")

    def resume(self) -> None:
        if (self.folder / "one").exists():
            self.engine.load_checkpoint(self.folder, tag="one")

    def reorder(self) -> None:
        self.model.order.reverse()

    def skip_a_block(self) -> None:
        self.model.order = self.model.order[:2] if len(self.model.order) == 4 else [0, 1, 2, 3]

    def offload(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.engine(*BATCHES[1]).item())


EVENTS = [name for name, value in vars(Loop).items() if callable(value) and name not in ("__init__", "run")]


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def outcome(
    events: list[str], folder: Path, tier: str, device: Any = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = engine_config(tier, tier, folder=folder, accumulation_buffers=True, **options)
    with open_engine(seeded(Reordered), config, device) as engine:
        loop = Loop(engine, folder / f"checkpoints on {tier}")
        for event in events:
            loop.run(event)
        if engine.micro_steps:
            engine.drop_gradients()
        return loop.losses, parameters_of(engine) | states_of(engine)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the extents whose windows were read ahead and taken."""
    found: list[str] = []
    take = WindowsAhead.take

    def recording(windows: WindowsAhead, extent: Any, *range_: Any) -> Any:
        window = take(windows, extent, *range_)
        if window is not None:
            found.append(extent.name)
        return window

    monkeypatch.setattr(WindowsAhead, "take", recording)
    return found


def pairs(count: int) -> list[str]:
    return ["backward", "step"] * count


@pytest.mark.parametrize("options", [{"clip": 0.3}, {"clip": 0.3, "update": "after_backward"}, {"bf16": True}], ids=str)
def test_the_first_states_are_read_when_step_is_called(options: dict[str, Any], tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, **{"update": "next_forward", **options})
    with open_engine(seeded(Stack), config) as engine:
        tiles = engine.parts.pools["tiles"]
        for number, batch in enumerate(BATCHES[:4]):
            engine.backward(engine(*batch))
            count = sum(tiles._counts.values())
            assert tiles.leased == (count if number else 0), "every idle buffer is used once a trace is known"
            engine.step()


def test_buffers_of_states_that_no_step_used_are_released_by_settle(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, update="next_forward", clip=0.3)) as engine:
        for batch in BATCHES[:3]:
            engine.backward(engine(*batch))
            engine.step()
        engine.backward(engine(*BATCHES[3]))
        assert engine.parts.pools["tiles"].leased
        engine.drop_gradients()
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("update", ["next_forward", "after_backward"])
def test_step_uses_the_states_that_were_read(update: str, taken: list[str], tmp_path: Path) -> None:
    events = pairs(4)
    options: dict[str, Any] = {"clip": 0.3, "update": update}
    result = outcome(events, tmp_path, "nvme", **options)
    assert "optimizer states of unit embedding" in taken and len(taken) >= 3 * 4
    assert_bits(result, outcome(events, tmp_path, "cpu", **options))


@pytest.mark.parametrize(
    "between",
    [
        "drop load",
        "drop keep",
        "drop set_states",
        "drop save resume",
        "drop resume",
        "drop offload",
        "drop load reorder",
        "unsynced",
        "edit",
        "edit_in_place",
        "overflow",
        "fail",
        "fail load",
        "evaluate",
        "reorder",
        "skip_a_block",
        "backward",
    ],
)
@pytest.mark.parametrize(("bf16", "late"), [(False, False), (True, True)], ids=["fp32", "bf16, late disk"])
def test_changes_after_the_read(
    between: str, bf16: bool, late: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """States that were read for a step are replaced, dropped with it, or used by a later one."""
    if late:
        use_late_disks(monkeypatch)
    events = [*pairs(1), "keep", "save", *pairs(2), "backward", *between.split(), *pairs(2)]
    options: dict[str, Any] = {"clip": 0.3, "bf16": bf16}
    assert_bits(outcome(events, tmp_path, "nvme", **options), outcome(events, tmp_path, "cpu", **options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    numbers: Iterator[int] = iter(range(10**6))
    base = tmp_path_factory.mktemp("sequences")

    def fresh() -> Path:
        folder = base / str(next(numbers))
        folder.mkdir()
        return folder

    return fresh


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([*["backward", "step"] * 4, *EVENTS]), min_size=6, max_size=24),
    st.sampled_from(["next_forward", "after_backward"]),
    st.booleans(),
)
def test_any_sequence_of_events_has_the_bits_of_states_in_memory(
    folders: Callable[[], Path], events: list[str], update: str, bf16: bool
) -> None:
    folder = folders()
    options: dict[str, Any] = {"clip": 0.3, "update": update, "bf16": bf16}
    events = [*pairs(2), *events]
    assert_bits(outcome(events, folder, "nvme", **options), outcome(events, folder, "cpu", **options))


def assert_bits(
    one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name

"""`ModelState`: containers are compared by what their order means, and restored as they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infinity.engine.model_state import ModelState
from support.configs import engine_config
from support.loops import open_engine
from support.models import VOCABULARY, Stack, seeded, token_batches


def refilled(numbers: set[Any]) -> list[Any]:
    """Return the order of `numbers` after they were removed and added in the order of iteration."""
    members = list(numbers)
    numbers.clear()
    numbers.update(members)
    return list(numbers)


def colliding() -> set[int]:
    """Return a set whose iteration order changes when it is filled again: both hashes have one place."""
    numbers = {7}
    numbers.add(15)
    return numbers


class Owner:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_the_set_of_these_tests_changes_its_order() -> None:
    assert list(colliding()) != refilled(colliding())


@pytest.mark.parametrize("members", [colliding(), {8, 16}, {"inv_freq", "mask"}, set(), {1.0, None}])
def test_a_set_that_was_filled_again_is_unchanged(members: set[Any]) -> None:
    owner = Owner(members)
    state = ModelState(owner)
    refilled(members)
    assert state.changed() is None
    assert state.restore()


def test_a_set_that_nothing_changed_keeps_its_order_when_restored() -> None:
    owner = Owner(colliding())
    before = list(owner.value)
    assert ModelState(owner).restore()
    assert list(owner.value) == before


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.add(3),
        lambda s: s.remove(7),
        lambda s: (s.remove(7), s.add(9)),
        lambda s: (s.remove(15), s.add(15.0)),
        lambda s: (s.remove(7), s.add(7.0)),
    ],
)
def test_a_set_with_other_members_is_changed_and_restored(edit: Callable[[set[Any]], object]) -> None:
    """Members are compared by type and value: 7.0 equals 7."""
    owner = Owner(colliding())
    state = ModelState(owner)
    edit(owner.value)
    assert state.changed() == "set"
    assert state.restore()
    assert {(type(member), member) for member in owner.value} == {(int, 7), (int, 15)}


def test_members_that_are_objects_are_compared_by_identity() -> None:
    one = (1, 2)
    other = tuple(one[:1] + one[1:])
    owner = Owner({one})
    state = ModelState(owner)
    owner.value.clear()
    owner.value.add(other)
    assert one == other and state.changed() == "set"
    assert state.restore() and next(iter(owner.value)) is one


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_mapping_is_restored_in_its_order(kind: type[dict[str, int]]) -> None:
    owner = Owner(kind(a=1, b=2, c=3))
    state = ModelState(owner)
    owner.value["a"] = owner.value.pop("a")
    assert state.changed() is not None
    assert state.restore() and list(owner.value) == ["a", "b", "c"]


def test_attributes_are_restored_in_their_order() -> None:
    """A forward that deletes an attribute and sets it again leaves it last."""
    model = torch.nn.Linear(2, 2)
    model.first, model.second = 1, 2  # type: ignore[assignment]
    before = list(model.__dict__)
    state = ModelState(model)
    del model.first
    assert state.changed() == "Linear"
    assert state.restore() and list(model.__dict__) == before


class Skips(Stack):
    """Holds a set and a dict. For a batch that begins with the last token, a path passes the blocks by, so that the
    step does not fit the vertical order. way: what such a forward does with the set and the dict.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.numbers, self.names = colliding(), {"a": 1, "b": 2}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if tokens[0, 0] == VOCABULARY - 1:
            x = x + first * (len(self.numbers) + self.names["a"])
            if self.way == "added":
                self.numbers.add(5)
            elif self.way == "refilled":
                refilled(self.numbers)
            elif self.way == "popped":
                self.names["a"] = self.names.pop("a") + 1
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("way", ["untouched", "refilled", "added", "popped"])
def test_a_step_that_falls_back_restores_sets_and_mappings(way: str) -> None:
    """The third step does not fit the vertical order, and runs again in the ordinary one."""
    config = engine_config(accumulation=3, unit_size=20_000)
    batches = [(tokens.clamp(max=VOCABULARY - 2), targets) for tokens, targets in token_batches(9)]
    batches[7][0][0, 0] = VOCABULARY - 1

    with open_engine(seeded(lambda: Skips(way)), config) as engine:
        expected = []
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            expected.append(loss.detach())
    with open_engine(seeded(lambda: Skips(way)), config) as engine:
        iterator = iter(batches)
        found = [engine.train_batch(iterator) for _ in range(3)]
        assert engine._batches._order is not None and engine._batches.reason
    for step, mean in enumerate(found):
        first, second, third = expected[3 * step : 3 * step + 3]
        assert torch.equal(mean, (first + second + third) / 3)


class Nested(torch.nn.Module):
    """A chain of modules, each within the former, with a buffer in each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None
        self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize("level", range(20))
def test_an_edited_buffer_at_any_depth_of_modules(level: int) -> None:
    model = module = Nested(20)
    state = ModelState(model)
    for _ in range(level):
        assert module.inner is not None
        module = module.inner
    module.seen += 1  # type: ignore[operator]
    assert state.changed() == "Tensor"


def test_a_part_that_a_longer_way_reaches_first() -> None:
    """A list is within the depth by the shorter of two ways, which is taken last."""
    shared = [[[0]]]
    far: Any = shared
    for _ in range(9):
        far = [far]
    owner = Owner((far, shared))
    state = ModelState(owner)
    shared[0][0].append(1)
    assert state.changed() == "list"


def test_a_part_of_the_last_root_that_the_first_one_reaches_too() -> None:
    shared = [[[0]]]
    far: Any = shared
    for _ in range(10):
        far = [far]
    state = ModelState(far, shared)
    shared[0][0].append(1)
    assert state.changed() == "list"


class Normalised(torch.nn.Module):
    """Embedding, blocks, and batch norm that lies deep in modules. A path passes the blocks by."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stack = Stack()
        norm: torch.nn.Module = torch.nn.BatchNorm1d(8)
        for _ in range(depth):
            norm = torch.nn.ModuleDict({"inner": norm})
        self.deep = norm

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = x = self.stack.embedding(tokens)
        for block in self.stack.blocks:
            x = block(x)
        norm = self.deep
        while isinstance(norm, torch.nn.ModuleDict):
            norm = norm["inner"]
        return F.cross_entropy(self.stack.head(norm(x + first)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("depth", range(0, 12, 2))
def test_running_statistics_count_each_micro_batch_once(depth: int) -> None:
    """A step that falls back has not changed the statistics of batch norm, however deep it lies."""
    config = engine_config(accumulation=3, unit_size=20_000)
    with open_engine(seeded(lambda: Normalised(depth)), config) as engine:
        iterator = iter(token_batches(9))
        for _ in range(3):
            engine.train_batch(iterator)
        buffers = dict(engine.module.named_buffers())
    (counted,) = (value for name, value in buffers.items() if name.endswith("num_batches_tracked"))
    assert counted == 9

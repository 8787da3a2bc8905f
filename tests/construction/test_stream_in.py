"""Values of a model on the way to their tiers: the writer's thread, and the seed that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.construction.stream_in import _share_seed, _writing


class Late:
    """An executor that carries out its work in a wait for it."""

    def submit(self, work: Any, *arguments: Any) -> _LateFuture:
        return _LateFuture(work, *arguments)


class _LateFuture(Future[Any]):
    def __init__(self, work: Any, *arguments: Any) -> None:
        super().__init__()
        self._work = work, arguments

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            work, arguments = self._work
            try:
                self.set_result(work(*arguments))
            except OSError as error:
                self.set_exception(error)
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self.exception()
        return super().result(timeout)


class States:
    def __init__(self, failing: int = -1) -> None:
        self.failing = failing
        self.written: list[int] = []

    def write(self, layout: int, flats: object) -> None:
        if layout == self.failing:
            raise OSError(28, "No space left on device")
        self.written.append(layout)


def writing(states: States) -> AbstractContextManager[Callable[[Any, Any], None]]:
    return _writing(states, Late())  # type: ignore[arg-type]


def test_a_write_begins_after_the_one_before_it() -> None:
    states = States()
    with writing(states) as write:
        for unit in range(3):
            write(unit, {})
            assert states.written == list(range(unit))
    assert states.written == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_a_write_is_raised(failing: int) -> None:
    """By the next write, or at the end of the block."""
    states = States(failing)
    with pytest.raises(OSError, match="No space"), writing(states) as write:
        for unit in range(3):
            write(unit, {})
    assert states.written == list(range(failing))


def test_an_exception_in_the_block_waits_for_the_write() -> None:
    """The tiers are closed next."""
    states = States()
    with pytest.raises(ValueError, match="on purpose"), writing(states) as write:
        write(0, {})
        raise ValueError("on purpose")
    assert states.written == [0]


@pytest.mark.parametrize(("others", "apart"), [(b"same", True), (b"another", False)])
def test_ranks_make_their_own_shards_if_they_would_make_the_same_values(others: bytes, apart: bool) -> None:
    values = SimpleNamespace(seed=5, fingerprint=lambda: b"same")
    ranks = SimpleNamespace(shards=2, gather=lambda mine: [(3, others), mine])
    assert _share_seed(values, ranks) == apart  # type: ignore[arg-type]
    assert values.seed == 3

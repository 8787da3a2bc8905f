"""Loads the device "late" for the tests of this folder. A backend stays for the whole process, so they run in one of
their own (`make test-late`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import late


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.late)


ORDERS = [("lazy", 0), ("random", 0), ("random", 1), ("eager", 0), ("eager", 1)]


@pytest.fixture(params=ORDERS, ids=lambda order: f"{order[0]}-{order[1]}")
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every mode, and several seeds where they matter most."""
    mode, seed = request.param
    late.drain()
    late.set_mode(mode)
    late.set_seed(seed)
    yield
    late.drain()


@pytest.fixture
def lazy() -> Iterator[None]:
    """Nothing runs that is not waited for."""
    late.drain()
    late.set_mode("lazy")
    late.set_seed(0)
    yield
    late.drain()


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    if not late.available():
        pytest.skip("the device of tests/late needs g++ and torch 2.9 or newer")
    late.load()

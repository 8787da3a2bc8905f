"""Groups of ranks, started once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Group


@pytest.fixture(scope="session")
def pair() -> Iterator[Group]:
    """Two ranks."""
    group = Group(2)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    """Four ranks."""
    group = Group(4)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def single() -> Iterator[Group]:
    """One rank with a process group: collectives take their full path and transfer nothing."""
    group = Group(1)
    yield group
    group.stop()

"""Groups of ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Group


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Group]]:
    found = {size: Group(size) for size in (1, 2, 4)}
    yield found
    for group in found.values():
        group.stop()

"""Cases for the processes of a `support.ranks.Group`: budgets that ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from infinity.engine import budget
from infinity.errors import InfinityError
from infinity.plan.budget import Budget
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded


def budget_of(rank: int, *, memory: Sequence[dict[str, Any]], folders: Sequence[str], free: Sequence[int]) -> Any:
    """Return the budget of an engine, or the error's text. Arguments: by rank. free: bytes of free host memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(budget, "available_memory", lambda: free[rank])
        try:
            with open_engine(seeded(Stack), engine_config(folder=folders[rank], memory=memory[rank])) as engine:
                found: Budget = engine.parts.plan.budget
                return found
        except InfinityError as error:
            return str(error)

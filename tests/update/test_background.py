"""Updates beside the model have a lower priority, unless they wait for a drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.update import kernels
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded, token_batches


@pytest.mark.parametrize(
    ("update", "optim", "background"),
    [
        ("during_backward", "cpu", True),
        ("next_forward", "cpu", True),
        ("after_backward", "cpu", False),
        ("during_backward", "nvme", False),
        ("next_forward", "nvme", False),
    ],
)
def test_priority_follows_schedule_and_tier(
    update: str, optim: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[bool] = set()
    update_flat = kernels.update_flat

    def observed(*args: Any, **given: Any) -> None:
        found.add(given["background"])
        update_flat(*args, **given)

    monkeypatch.setattr(kernels, "update_flat", observed)
    config = engine_config("cpu", optim, folder=tmp_path, update=update)
    with open_engine(seeded(Stack), config) as engine:
        for batch in token_batches(5):
            engine.backward(engine(*batch))
            engine.step()
    assert found == {background}

"""Frozen tensor subclasses on two ranks: sharded by their inner tensors, with rank 0's values."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank import wrapper_cases as cases
from support.beside import assert_like
from support.models import seeded, vector_batches
from support.ranks import Group


@pytest.mark.parametrize(
    "stage, param, optim",
    [(0, "none", "none"), (1, "none", "cpu"), (2, "none", "nvme"), (3, "cpu", "cpu"), (3, "nvme", "nvme")],
)
def test_train_like_dequantised_weights(pair: Group, stage: int, param: str, optim: str, tmp_path: Path) -> None:
    """Both ranks end with the same bits, which ordinary weights have too, and a checkpoint of both is whole."""
    place = {"stage": stage, "param": param, "optim": optim, "folder": str(tmp_path)}
    save = str(tmp_path / "saved") if stage == 3 else ""
    found = pair.run(cases.trained, kind="quantised", save=save, prefetch_bytes=0, **place)
    expected = pair.run(cases.trained, kind="dequantised", prefetch_bytes=0, **place)
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert_like(one["values"], other["values"])
        assert_like(one["weights"], other["weights"])
    assert_like(found[0]["values"], found[1]["values"])
    assert_like(found[0]["weights"], found[1]["weights"])
    plainly = seeded(cases.MAKERS["quantised"])
    assert plainly(*vector_batches(1, seed=0)[0]).item() == found[0]["losses"][0]
    assert plainly(*vector_batches(1, seed=1)[0]).item() == found[1]["losses"][0]


def test_run_in_inference(pair: Group, tmp_path: Path) -> None:
    assert all(pair.run(cases.generated, folder=str(tmp_path)))

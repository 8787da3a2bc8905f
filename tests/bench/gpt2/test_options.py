"""Options of a job: defaults that depend on other options, and refused combinations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2.options import SAMPLE_BYTES, SHAPE, JobOptions
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SAMPLE_BYTES),
        ({"shape": replace(SHAPE, checkpoint_activations=True), "batch_size": 2, "data": "x"}, SAMPLE_BYTES),
        ({"shape": replace(SHAPE, num_layers=7)}, 0),
        ({"config": "engine.json"}, 0),
        ({"config": "engine.json", "sample": 1000}, 1000),
        ({"sample": 0}, 0),
    ],
)
def test_sample_is_written_by_default_for_the_default_model_only(changes: dict[str, Any], expected: int) -> None:
    assert JobOptions(**changes).sample_bytes == expected


def test_nvme_folder_is_the_given_one_or_lies_in_the_output() -> None:
    assert JobOptions(output=Path("out")).nvme_folder == Path("out/nvme")
    assert JobOptions(output=Path("out"), nvme_path="drive").nvme_folder == Path("drive")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": replace(SHAPE, vocab_size=255)}, "--vocab-size is 255, but a byte has 256 values"),
        ({"config": "a.json", "nvme_path": "drive"}, "Set nvme_path in a.json instead"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobOptions(**changes)

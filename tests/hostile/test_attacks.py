"""Attacks on every reader end in the project's own errors, soon and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostile.attacks import ATTACKS, Attack

pytestmark = pytest.mark.timeout(900)

TESTS = Path(__file__).parents[1]
LARGEST = 400 << 20
"""Bytes by which the resident memory of a reader may grow: an engine takes most of it."""
SLOWEST = 10.0
"""Seconds of processors."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "hostile", str(tmp_path_factory.mktemp("hostile"))],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["name"]: each for each in found}


def test_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: ascii(attack.name))
def test_an_attack_ends_in_an_error_of_the_project(results: dict[str, dict[str, Any]], attack: Attack) -> None:
    result = results[attack.name]
    assert attack.error.__name__ in result["error"], result["text"] or result["error"]
    assert attack.says in result["text"], result["text"]
    assert result["nbytes"] < LARGEST and result["seconds"] < SLOWEST, result
    assert "uid=" not in result["text"] and "root:" not in result["text"]

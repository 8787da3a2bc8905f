"""The examples of docs/plan.md print what the page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign  # half a minute of simulation
def test_the_page_shows_what_its_commands_print() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "draw_plan.py", "--check"], check=True)

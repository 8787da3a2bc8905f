"""Real file systems for tests, read-only or small."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest


def mount(*arguments: str) -> Callable[[], None]:
    """Mount; the test is skipped where that is not allowed. Returns what unmounts."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not let a test mount: {done.stderr.strip()}")
    return lambda: subprocess.run(["umount", arguments[-1]], check=True).check_returncode()

"""Real file systems for tests, read-only or small."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest


def mount(*arguments: str) -> Callable[[], None]:
    """Mount, or skip the test if that is not permitted. Return a function that unmounts."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not let a test mount: {done.stderr.strip()}")
    return lambda: subprocess.run(["umount", arguments[-1]], check=True).check_returncode()

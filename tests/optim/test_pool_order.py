"""The pool's order: an urgent job, such as the sum of a gradient's squares, does not wait for the end of an update."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"


def test_threads_leave_a_normal_job_for_an_urgent_one(tmp_path: Path) -> None:
    """A program whose jobs wait for each other: in the wrong order it ends only by its limit of time."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the program")
    program, sources = tmp_path / "order", [Path(__file__).parent / "pool/order.cpp", SOURCES / "adam/thread_pool.cpp"]
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's library
    subprocess.run([compiler, "-std=c++20", "-pthread", f"-I{SOURCES}", *sources, "-o", program], check=True, env=plain)
    run = subprocess.run([program], capture_output=True, text=True, check=True, env=plain)
    assert run.stdout == "ok\n"

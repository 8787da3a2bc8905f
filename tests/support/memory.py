"""Measures the peak memory of a function in a process of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak_rss(work: Callable[..., object], /, **options: object) -> int:
    """The largest resident memory, bytes, of a new process that calls `work(**options)`, as the system counts it.

    work: a function of a module that can be imported by the name it has here. What Python and torch take is in it.
    AssertionError, with what the process said, if it fails.
    """
    call = pickle.dumps((sys.path, work.__module__, work.__qualname__, options))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=call, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout.split()[-1])


def high_water_mark() -> int:
    """Bytes. (`getrusage` counts what the process was before it became this program.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_and_tell(work: Callable[..., object], options: dict[str, object]) -> None:
    torch.set_num_threads(1)
    work(**options)
    print(high_water_mark())


_CHILD = """
import importlib, pickle, sys
path, module, name, options = pickle.load(sys.stdin.buffer)
sys.path[:] = path
from support.memory import run_and_tell
run_and_tell(getattr(importlib.import_module(module), name), options)
"""

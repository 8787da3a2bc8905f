"""Facts of a machine that its bandwidths depend on, and the memory of a process that imported the engine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import psutil
import torch

from infinity.cli.report import processor
from infinity.errors import InfinityError
from infinity.tiers.device import Device

_IMPORTS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch, infinity
infinity.initialize, infinity.Engine
import psutil
print(psutil.Process().memory_info().rss)
"""


def baseline_rss() -> int:
    """Return the resident bytes of a new process that has imported torch and the modules of `infinity.initialize`."""
    command = [sys.executable, "-I", "-c", _IMPORTS, json.dumps(sys.path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        reason = (ended.stderr.splitlines() or ["no output"])[-1]
        raise InfinityError(f"a process that imports torch and infinity ended with {ended.returncode}: {reason}")
    return int(ended.stdout)


def machine(device: Device) -> dict[str, Any]:
    """Return the facts, of JSON types."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "device": device_name(device),
    }


def device_name(device: Device) -> str:
    """Return the accelerator's name; "cpu" if the engine computes on the host."""
    kind = device.torch_device
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(name(kind)) if name is not None else str(kind)

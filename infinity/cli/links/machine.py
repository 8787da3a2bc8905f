"""Facts of a machine that its bandwidths depend on, and the memory of a process that trains next to nothing."""

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

_TRAINING = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import psutil, torch, infinity
from infinity.sim.gpt2 import GPT2, GPT2Config
with torch.device("meta"):
    model = GPT2(GPT2Config(vocab_size=64, seq_length=16, num_layers=1, hidden_size=64, num_attention_heads=2))
engine, *_ = infinity.initialize(model=model, config={"train_batch_size": 1, "bf16": {"enabled": True}})
tokens = torch.zeros(1, 16, dtype=torch.int64)
for _ in range(2):
    engine.backward(engine(tokens, tokens))
    engine.step()
print(psutil.Process().memory_info().rss)
engine.close()
"""


def baseline_rss() -> int:
    """Return the resident bytes of a new process that has imported torch and trained a transformer of one small layer.

    Importing alone leaves out what training loads: torch's compiler, which a model on the meta device imports, the
    kernels' code, such as that of attention, and the stacks of threads.
    """
    command = [sys.executable, "-I", "-c", _TRAINING, json.dumps(sys.path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=_of_one_rank())
    if ended.returncode:
        reason = (ended.stderr.splitlines() or ["no output"])[-1]
        raise InfinityError(f"a process that imports torch and infinity ended with {ended.returncode}: {reason}")
    return int(ended.stdout.splitlines()[-1])


def _of_one_rank() -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with which a process waits for other ranks."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in names}


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

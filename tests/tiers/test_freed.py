"""Freed blocks of the C library: returned to the system while memory is short, kept otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FREED = """
import resource, sys
import torch
from infinity.tiers import freed

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

getattr(freed, sys.argv[1])()
torch.empty(8).fill_(1.0)
before = resident()
small, large = [], []
for _ in range(40):
    large.append(torch.ones(1 << 20))  # 4 MiB, between blocks that stay
    small.append(torch.ones(1 << 10))
large.clear()
print((resident() - before) >> 20)
"""

TRAINED = """
import resource, sys
import torch
from torch.utils.checkpoint import checkpoint
import infinity
from infinity.tiers import headroom

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
            for _ in range(12)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

def resident(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

left = int(sys.argv[2])
headroom.available_memory = lambda: left
torch.manual_seed(0)
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {"train_batch_size": 1, "zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}
with infinity.initialize(model=Deep(), config=config)[0] as engine:
    losses = []
    for step in range(6):
        # Batches of many sizes leave free blocks that do not fit the next ones.
        loss = engine(torch.randn(3000 + 700 * (step * 5 % 6), 256))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if not step:
            first = resident("VmHWM")
print(*losses)
print(resident("VmHWM") - first >> 20)
"""


def printed(script: str, *arguments: Any, environ: dict[str, str] | None = None) -> list[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | (environ or {}))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("called", "environ", "is_returned"),
    [
        ("return_freed_blocks", {}, True),
        ("keep_freed_blocks", {}, False),
        # Settings of the user hold.
        ("return_freed_blocks", {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, False),
        ("keep_freed_blocks", {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}, True),
    ],
)
def test_blocks_are_returned_or_kept(called: str, environ: dict[str, str], is_returned: bool) -> None:
    """160 MiB in blocks of 4 MiB, each before a block that stays."""
    (left,) = printed(FREED, called, environ=environ)
    assert int(left) < 16 if is_returned else int(left) > 100


def test_a_run_that_is_short_of_memory_takes_less_of_it(tmp_path: Path) -> None:
    """Peaks after the first step, whose batch is the smallest one; losses are the same."""
    losses, kept = printed(TRAINED, tmp_path, 64 << 30)
    again, returned = printed(TRAINED, tmp_path, 64 << 20)
    assert again == losses and int(returned) < int(kept) / 2

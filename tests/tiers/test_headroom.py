"""Host memory in a model's first pass: an error in place of the kernel's kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infinity.errors import OutOfMemoryError
from infinity.tiers import headroom
from infinity.tiers.headroom import Headroom

MIB = 1 << 20

LIMITED = """
import resource, sys
import torch
import infinity
from infinity.errors import OutOfMemoryError
from infinity.tiers.device import CpuDevice

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(40))

    def forward(self, x):
        for block in self.blocks:
            x = torch.sigmoid(block(x))  # saved for backward: 8 MiB a block
        return x.mean()

torch.set_num_threads(1)
config = {"train_batch_size": 1, "infinity": {"unit_size": 16384, "cache_bytes": 0}}
engine = infinity.initialize(model=Wide(), config=config, device=CpuDevice())[0]
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 150 * 2**20, resource.RLIM_INFINITY))
try:
    engine(torch.randn(32768, 64))
except OutOfMemoryError as error:
    print(error)
    engine.close()
    print("closed")
"""


def test_a_first_forward_that_memory_does_not_hold_ends_in_an_error_that_names_the_unit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    message, closed = done.stdout.splitlines()
    assert closed == "closed"
    assert "first pass has taken" in message and "until unit blocks." in message
    assert "infinity.activations.device" in message


def test_what_the_last_unit_took_has_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth is that of this process: what another one takes meanwhile is no growth of a unit."""
    held, left = [0], [1000 * MIB]
    monkeypatch.setattr(headroom, "_private_bytes", lambda: held[0])
    monkeypatch.setattr(headroom, "available_memory", lambda: left[0])
    found = Headroom(uses=6)
    found.follow("a")
    left[0] -= 900 * MIB  # another process
    found.follow("b")
    held[0] += 60 * MIB
    left[0] -= 40 * MIB
    found.follow("c")  # 60 of 60 MiB are left
    left[0] -= 1
    found.follow("d")  # nothing was taken since
    held[0] += 60 * MIB
    with pytest.raises(OutOfMemoryError, match=r"120|126 MB beside the engine's buffers until unit e") as caught:
        found.follow("e")
    assert (caught.value.needed, caught.value.available) == (60 * MIB, 60 * MIB - 1)
    left[0] = 16 * MIB - 1
    with pytest.raises(OutOfMemoryError, match="until unit f"):
        found.follow("f")
    found.follow("g")  # only the first six are checked


def test_private_bytes_follow_what_is_written(tmp_path: Path) -> None:
    before = headroom._private_bytes()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    assert headroom._private_bytes() - before >= 60 * MIB

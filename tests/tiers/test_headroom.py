"""Host memory that is left while a model runs: a warning before the kernel would kill the process."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest

from infinity.observe.log import logger
from infinity.tiers import headroom
from infinity.tiers.headroom import Headroom, Pass, Use

MIB = 1 << 20

LIMITED = """
import resource
import torch
import infinity
from infinity.tiers.device import CpuDevice

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(40))

    def forward(self, x):
        for block in self.blocks:
            x = torch.sigmoid(block(x))  # saved for backward: 8 MiB a block
        return x.mean()

torch.set_num_threads(1)
config = {"train_batch_size": 1, "infinity": {"unit_size": 16384, "cache_bytes": 0}}
engine = infinity.initialize(model=Deep(), config=config, device=CpuDevice())[0]
engine(torch.randn(4, 64))
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 150 * 2**20, resource.RLIM_INFINITY))
try:
    engine(torch.randn(32768, 64))
except RuntimeError as error:
    assert "can't allocate memory" in str(error)
    engine.close()
    print("closed")
"""


def test_a_forward_that_memory_does_not_hold_is_announced() -> None:
    """Once, by a line that names the unit. A small batch before it announces nothing."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "closed\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "host memory:" in line]
    assert "are left before unit blocks." in line and "infinity.activations.device" in line


def use(unit: str, done: int) -> Use:
    return Use(unit, 1, done, Pass.FORWARD)


def test_what_the_last_unit_took_has_to_be_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Growth is that of this process: what another one takes meanwhile is no growth of a unit."""
    peak, left = [1000 * MIB], [1000 * MIB]
    monkeypatch.setattr(headroom, "_resident", lambda: peak[0])
    monkeypatch.setattr(headroom, "available_memory", lambda: left[0])
    monkeypatch.setattr(logger, "propagate", True)
    found = Headroom()
    assert found.is_due()
    peak[0] += 300 * MIB  # the script loads its data
    left[0] -= 900 * MIB  # and another process
    found.look(use("a", 0))
    peak[0] += 60 * MIB
    left[0] -= 24 * MIB
    found.look(use("b", 1))  # as many are left, and 16 MiB
    left[0] = 0
    found.look(use("c", 2))  # no new peak
    assert not caplog.records
    peak[0] += 20 * MIB
    left[0] = 20 * MIB - 1
    found.look(use("d", 3))
    monkeypatch.setattr(headroom, "now", lambda: 1e18)
    assert not found.is_due()
    (record,) = caplog.records
    assert "20.97 MB are left before unit d" in record.getMessage()


def test_small_units_are_not_followed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes longer than a use of a unit that is resident."""
    monkeypatch.setattr(headroom, "now", count(1.0, 0.001).__next__)
    found = Headroom()
    assert 10 <= sum(found.is_due() for _ in range(100)) <= 21


def test_a_simulated_run_watches_nothing() -> None:
    """The machine that is simulated is not this one."""
    assert not Headroom(watches=False).is_due()

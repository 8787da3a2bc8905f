"""Host memory that is left while a model runs: freed blocks, and a warning before the kernel would kill the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count

import pytest

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
    assert "are left before unit blocks." in line and " --host-memory " in line


class Memory:
    """Memory of a made-up process. `calls` has what is done with its freed blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident, self.left = 1000 * MIB, 1000 * MIB
        self.calls: list[str] = []
        monkeypatch.setattr(headroom, "_resident", lambda: self.resident)
        monkeypatch.setattr(headroom, "available_memory", lambda: self.left)
        monkeypatch.setattr(headroom.logger, "propagate", True)
        for name in ("return_freed_blocks", "return_freed_memory", "keep_freed_blocks"):
            monkeypatch.setattr(headroom, name, self._noted(name))

    def _noted(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)

    def take(self, nbytes: int) -> None:
        self.resident += nbytes
        self.left -= nbytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def use(unit: str, within: Pass = Pass.FORWARD, cycle: int = 1) -> Use:
    return Use(unit, cycle, within)


def test_what_the_last_unit_took_has_to_be_left(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """Growth is that of this process: what another one takes meanwhile is no growth of a unit."""
    found = Headroom()
    memory.take(300 * MIB)  # the script loads its data
    memory.left = 100 * MIB  # and another process
    found.look(use("a"))
    memory.resident += 60 * MIB
    memory.left = 76 * MIB
    found.look(use("b"))  # as many are left, and 16 MiB
    memory.left = 0
    found.look(use("c"))  # no new peak
    assert not caplog.records
    memory.resident += 20 * MIB
    memory.left = 20 * MIB - 1
    found.look(use("d"))
    memory.resident += 20 * MIB
    found.look(use("e"))
    (record,) = caplog.records
    assert "20.97 MB are left before unit d" in record.getMessage()


def forward_and_backward(found: Headroom, memory: Memory, nbytes: int, cycle: int) -> None:
    found.look(use("a", cycle=cycle))
    memory.take(nbytes)
    found.look(use("b", cycle=cycle))
    found.look(use("b", Pass.BACKWARD, cycle))
    memory.take(-nbytes)


def test_freed_blocks_are_kept_once_a_step_left_memory_for_them(memory: Memory) -> None:
    """An evaluation, or a forward without a backward, does not tell what a step takes."""
    found = Headroom()
    found.look(use("a", Pass.WITHOUT_GRAPH))
    assert memory.calls == []
    found.look(use("a", cycle=2))
    forward_and_backward(found, memory, 300 * MIB, cycle=3)
    assert memory.calls == ["return_freed_blocks"]
    found.look(use("a", cycle=4))
    assert memory.calls == ["return_freed_blocks", "keep_freed_blocks"]
    forward_and_backward(found, memory, 200 * MIB, cycle=5)
    assert len(memory.calls) == 2


def test_freed_blocks_are_returned_while_memory_is_short(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """Less than twice the activations is left. A longer batch may come after steps that left more."""
    found = Headroom()
    forward_and_backward(found, memory, 400 * MIB, cycle=1)
    memory.left = 600 * MIB
    found.look(use("a", cycle=2))
    returned = ["return_freed_blocks", "return_freed_memory"]
    assert memory.calls == ["return_freed_blocks", *returned]
    memory.left = 900 * MIB
    other = Headroom()
    forward_and_backward(other, memory, 100 * MIB, cycle=1)
    other.look(use("a", cycle=2))
    memory.calls.clear()
    memory.left = 1000 * MIB
    forward_and_backward(other, memory, 400 * MIB, cycle=2)
    assert memory.calls == returned and not caplog.records


def test_small_units_are_not_followed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes longer than a use of a unit that is resident."""
    moments = count(1.0, 0.001)
    monkeypatch.setattr(headroom, "now", lambda: next(moments))
    found = Headroom()
    assert 10 <= sum(found.is_due() for _ in range(100)) <= 21


def test_a_simulated_run_watches_nothing() -> None:
    assert not Headroom(watches=False).is_due()

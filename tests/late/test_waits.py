"""Every sleep of the model's threads in a step is counted, with its reason, on an accelerator whose work is late."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from infinity.observe.ledger import REASONS
from infinity.observe.recorder import Recorder
from infinity.tiers.accelerator import StreamTransfer
from infinity.tiers.pool import Pool
from infinity.tiers.transfer import Promise
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded, token_batches

CASES: dict[str, dict[str, Any]] = {
    "during backward": {},
    "clipping": {"clip": 0.5},
    "accumulation": {"accumulation": 2},
    "bf16": {"bf16": True},
    "bf16, clipping, accumulation": {"bf16": True, "clip": 0.5, "accumulation": 2},
    "next forward": {"update": "next_forward"},
    "after backward": {"update": "after_backward"},
}
PLACEMENTS = [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]


class Watch:
    """Notes where a thread of the model sleeps outside of `Recorder.wait`, while `is_on`."""

    def __init__(self, recorder: Recorder) -> None:
        self.uncounted: list[str] = []
        self.sleeps = 0
        self.is_on = False
        self._recorder = recorder

    def on(self, owner: type, name: str, is_done: Callable[[Any], bool]) -> tuple[type, str, Any]:
        """Return (owner, name, method) that watches a method which sleeps unless `is_done`."""
        method = getattr(owner, name)

        def watched(this: Any, *arguments: Any, **more: Any) -> Any:
            if self.is_on and not threading.current_thread().name.startswith("infinity-") and not is_done(this):
                self.sleeps += 1
                if not self._recorder.is_waiting:
                    self.uncounted.append("".join(traceback.format_stack(limit=8)))
            return method(this, *arguments, **more)

        return owner, name, watched


def _is_passed(transfer: StreamTransfer) -> bool:
    return bool(transfer.event.query())


@pytest.fixture
def device() -> LateAccelerator:
    return LateAccelerator()


@pytest.fixture
def watch(device: LateAccelerator, monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch(device.recorder)
    monkeypatch.setattr(*found.on(StreamTransfer, "wait", _is_passed))
    monkeypatch.setattr(*found.on(Promise, "issued", lambda promise: promise._done))
    monkeypatch.setattr(*found.on(Pool, "_wait", lambda pool: False))
    monkeypatch.setattr(*found.on(Future, "result", Future.done))
    monkeypatch.setattr(*found.on(Future, "exception", Future.done))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_every_sleep_of_a_step_is_counted(
    lazy: None, device: LateAccelerator, watch: Watch, param: str, optim: str, case: str
) -> None:
    config = engine_config(param, optim, prefetch_bytes=20_000, **CASES[case])
    with open_engine(seeded(Stack), config, device) as engine:
        for number, batch in enumerate(token_batches(8)):
            here = [part.to(device.torch_device) for part in batch]
            watch.is_on = number >= 2  # the first steps allocate, and record the order of units
            engine.backward(engine(*here))
            engine.step()
            watch.is_on = False
        waits = engine.ledger.waits()
        torch.accelerator.synchronize()
    assert not watch.uncounted, watch.uncounted[0]
    assert set(waits) <= set(REASONS)
    if param != "none":
        assert watch.sleeps > 0


def test_the_reason_of_an_eviction_is_the_compute_before_it(lazy: None, device: LateAccelerator) -> None:
    """The thread sleeps until the fingerprint of a unit is computed, which is behind all compute issued before."""
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", prefetch_bytes=20_000), device) as engine:
        before = 0
        for batch in token_batches(4):
            engine.backward(engine(*(part.to(device.torch_device) for part in batch)))
            engine.step()
            waits = engine.ledger.waits()
            assert waits["edits"].count > before
            before = waits["edits"].count
        assert waits["edits"].stood_still <= waits["edits"].slept + waits["small copies"].slept + 1.0

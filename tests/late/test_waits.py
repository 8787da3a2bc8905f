"""Every sleep of the model's threads in a step is counted, with its reason, on an accelerator whose work is late."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.observe.ledger import REASONS, Waited
from infinity.observe.recorder import Recorder
from infinity.tiers.accelerator import StreamTransfer
from infinity.tiers.nvme import Request
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
    "fp16": {"fp16": {"enabled": True}},
    "activations": {"activations": {"device": "cpu"}},
}
PLACEMENTS = [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]


class Watch:
    """Notes where a thread of the model sleeps outside of `Recorder.wait`, while `is_on`."""

    def __init__(self, recorder: Recorder) -> None:
        self.uncounted: list[str] = []
        self.sleeps = 0
        self.is_on = False
        self._recorder = recorder

    def on(self, owner: type, name: str, is_done: Callable[..., bool]) -> tuple[type, str, Any]:
        """Return (owner, name, method) that watches a method which sleeps unless `is_done` of its arguments."""
        method = getattr(owner, name)

        def watched(this: Any, *arguments: Any, **more: Any) -> Any:
            is_ours = self.is_on and not threading.current_thread().name.startswith("infinity-")
            if is_ours and not is_done(this, *arguments, **more):
                self.sleeps += 1
                if not self._recorder.is_waiting:
                    self.uncounted.append("".join(traceback.format_stack(limit=8)))
            return method(this, *arguments, **more)

        return owner, name, watched


def _is_passed(transfer: StreamTransfer) -> bool:
    return bool(transfer.event.query())


def _is_here(tensor: torch.Tensor, *arguments: Any, **more: Any) -> bool:
    """Return whether the host can read a tensor without a wait for the device."""
    return tensor.device.type != "late"


def _stays(tensor: torch.Tensor, *arguments: Any, **more: Any) -> bool:
    return tensor.device.type != "late" or not any(each in ("cpu", torch.device("cpu")) for each in arguments)


def _is_issued(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    return non_blocking or not target.is_cpu or source.device.type != "late"


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor whose result is in host memory."""


@pytest.fixture
def device() -> LateAccelerator:
    return LateAccelerator()


@pytest.fixture
def watch(device: LateAccelerator, monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch(device.recorder)
    monkeypatch.setattr(*found.on(StreamTransfer, "wait", _is_passed))
    monkeypatch.setattr(*found.on(Promise, "issued", lambda promise: promise._done))
    monkeypatch.setattr(*found.on(Pool, "_wait", lambda *arguments: False))
    monkeypatch.setattr(*found.on(Future, "result", lambda future, *arguments: future.done()))
    monkeypatch.setattr(*found.on(Future, "exception", lambda future, *arguments: future.done()))
    monkeypatch.setattr(*found.on(Request, "wait", Request.done))
    monkeypatch.setattr(*found.on(threading.Condition, "wait", lambda condition, timeout=None: timeout == 0))
    monkeypatch.setattr(*found.on(threading.Thread, "join", lambda thread, *arguments: not thread.is_alive()))
    for name in READS:
        monkeypatch.setattr(*found.on(torch.Tensor, name, _is_here))
    monkeypatch.setattr(*found.on(torch.Tensor, "to", _stays))
    monkeypatch.setattr(*found.on(torch.Tensor, "copy_", _is_issued))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_every_sleep_of_a_step_is_counted(
    lazy: None, device: LateAccelerator, watch: Watch, param: str, optim: str, case: str
) -> None:
    config = engine_config(param, optim, prefetch_bytes=20_000, **CASES[case])
    waits = watched_steps(seeded(Stack), config, device, watch)
    assert set(waits) <= set(REASONS)
    if param != "none":
        assert watch.sleeps > 0


def watched_steps(model: torch.nn.Module, config: Config, device: LateAccelerator, watch: Watch) -> dict[str, Waited]:
    """Train, and fail if a sleep was not counted. Returns the waits by reason."""
    with open_engine(model, config, device) as engine:
        for number, batch in enumerate(token_batches(8)):
            here = [part.to(device.torch_device) for part in batch]
            watch.is_on = number >= 2  # the first steps allocate, and record the order of units
            engine.backward(engine(*here))
            engine.step()
            watch.is_on = False
        waits = engine.ledger.waits()
        torch.accelerator.synchronize()
    assert not watch.uncounted, watch.uncounted[0]
    return waits


class Edited(Stack):
    """Edits a block after each forward, in a way that has no version. views: also keeps a view of another one."""

    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(self.edit)
        self._views, self._kept = views, list[torch.Tensor]()

    def edit(self, block: torch.nn.Module, *_: Any) -> None:
        next(iter(block.parameters())).data.view(-1)[3:50].mul_(0.5)
        if self._views and not self._kept:
            self._kept.append(next(iter(self.blocks[1].parameters())).detach())


@pytest.mark.parametrize("case", ["edits", "views", "reports"])
@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme")])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_every_sleep_is_counted_with(
    lazy: None, device: LateAccelerator, watch: Watch, tmp_path: Path, param: str, optim: str, bf16: bool, case: str
) -> None:
    config = engine_config(param, optim, prefetch_bytes=20_000, bf16=bf16)
    if case == "reports":
        monitor = config.csv_monitor.model_copy(update={"enabled": True, "output_path": str(tmp_path)})
        config = config.model_copy(update={"steps_per_print": 1, "wall_clock_breakdown": True, "csv_monitor": monitor})
    watched_steps(seeded(lambda: Edited(views=case == "views")), config, device, watch)


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

"""The user's modes (dispatch, function, default device, selective checkpoints) may enclose any part of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from infinity.units.compiled import outside_modes
from support.beside import LATE_TOO, NVME, PLACES, assert_same_story, training
from support.models import Linears, vector_batches

BATCHES = vector_batches(5)


class Dispatched(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device() -> Any:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # get_default_device of torch 2.6 fails on None


@contextmanager
def several() -> Any:
    with torch.device("cpu"), Dispatched(), Called(), FlopCounterMode(display=False):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Dispatched,
    "function": Called,
    "device": lambda: torch.device("cpu"),
    "default device": default_device,
    "flops": lambda: FlopCounterMode(display=False),
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "several": several,
    "meta": lambda: torch.device("meta"),
}


def in_modes(around: str, mode: str) -> Any:
    def story(loop: Any) -> list[float]:
        def when(part: str) -> AbstractContextManager[Any]:
            return MODES[mode]() if around in (part, "each") else nullcontext()

        seen = []
        with when("all"):
            for batch in BATCHES:
                with when("forward"):
                    loss = loop.model(*batch)
                with when("backward"):
                    loop.backward(loss)
                with when("step"):
                    loop.step()
                with when("read"):
                    seen += [loss.item(), *(p.detach().sum().item() for p in loop.model.parameters())]
        return seen

    return story


@LATE_TOO
@pytest.mark.parametrize("mode", [name for name in MODES if name != "meta"])
@pytest.mark.parametrize("around", ["forward", "backward", "step", "read", "each", "all"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_training_in_a_mode(around: str, mode: str, place: dict[str, Any]) -> None:
    assert_same_story(Linears, in_modes(around, mode), place=place, units=8)


@PLACES
@pytest.mark.parametrize("around", ["backward", "step", "read"])
def test_a_default_device_that_is_another(around: str, place: dict[str, Any]) -> None:
    """Engine tensors are created on the right device, whatever the default device is."""
    assert_same_story(Linears, in_modes(around, "meta"), place=place, units=8)


def test_a_mode_sees_the_models_operations_only() -> None:
    """A mode sees the plain loop's operations and none of the engine's.

    `detach` is left out: without hooks autograd detaches the tensors that it saves.
    """

    def story(loop: Any) -> list[Any]:
        seen = []
        for batch in BATCHES[:3]:
            with Dispatched() as mode:
                loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            seen.append(sorted((name, n) for name, n in mode.seen.items() if name != "aten.detach.default"))
        return seen

    assert_same_story(Linears, story, place=NVME, units=8)


def test_flops_are_those_of_the_plain_loop() -> None:
    def story(loop: Any) -> list[int]:
        seen = []
        for batch in BATCHES[:3]:
            with FlopCounterMode(display=False) as forward:
                loss = loop.model(*batch)
            with FlopCounterMode(display=False) as backward:
                loop.backward(loss)
            loop.step()
            seen += [forward.get_total_flops(), backward.get_total_flops()]
        return seen

    assert_same_story(Linears, story, place=NVME, units=8)


# -- selective checkpoints -------------------------------------------------------------------------------------------

_SAVED = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def saves_others(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if op in _SAVED else CheckpointPolicy.MUST_SAVE


POLICIES: dict[str, Any] = {
    "products": saves_products,
    "others": saves_others,
    "a list": [torch.ops.aten.mm.default, torch.ops.aten.tanh.default],
}


class Selective(nn.Module):
    """Layers of two products each, under selective checkpoints, each alone or in pairs; a weight read in between."""

    def __init__(self, policy: str, together: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32, bias=False)) for _ in range(6)
        )
        self.policy, self.together = policy, together

    def part(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[first : first + self.together]:
            x = x + 0.3 * torch.tanh(layer(x)) + 0.1 * x @ self.layers[0][2].weight.t()  # type: ignore[index]
        return x

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, POLICIES[self.policy])
        for first in range(0, 6, self.together):
            x = checkpoint(partial(self.part, first), x, use_reentrant=False, context_fn=contexts)
        return F.mse_loss(x, targets)


@LATE_TOO
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_selective_checkpoints(update: str, together: int, policy: str, place: dict[str, Any]) -> None:
    story = training(BATCHES)
    assert_same_story(lambda: Selective(policy, together), story, place={**place, "update": update}, units=6)


@PLACES
def test_selective_checkpoints_in_a_mode(place: dict[str, Any]) -> None:
    assert_same_story(lambda: Selective("products", 2), in_modes("all", "several"), place=place, units=6)


def test_suspended_modes_return_in_their_order_after_an_error() -> None:
    with Dispatched() as outer, FakeTensorMode(), Dispatched() as inner:
        before = _get_current_dispatch_mode_stack()
        with pytest.raises(ValueError, match="in the block"), outside_modes():
            assert not _get_current_dispatch_mode_stack()
            torch.ones(1)
            raise ValueError("in the block")
        assert _get_current_dispatch_mode_stack() == before
    assert not outer.seen and not inner.seen

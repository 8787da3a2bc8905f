"""Checks of what `engine.train_batch(blocks=...)` is called with, before anything runs, and of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from infinity.engine.parts import EngineParts
from infinity.errors import UsageError
from infinity.model.topmost import topmost_hooks
from infinity.tiers.device import Device
from infinity.units.compiled import is_compiled


def blocks_of(model: nn.Module, blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return `blocks` as a tuple. Raises UsageError unless they are different modules of `model`."""
    found, modules = tuple(blocks), set(model.modules())
    if not found:
        raise UsageError("engine.train_batch(blocks=...) takes the modules that run one after the other, and got none")
    for number, block in enumerate(found):
        if not isinstance(block, nn.Module):
            problem = f"is a {type(block).__name__}, not a module"
        elif block not in modules:
            problem = "is not a module of the engine's model: pass those of engine.module"
        elif block in found[:number]:
            problem = f"is blocks[{found.index(block)}] again, and each block runs once a forward"
        else:
            continue
        raise UsageError(f"engine.train_batch(blocks=...): blocks[{number}] {problem}")
    return found


def check_context(model: nn.Module, parts: EngineParts) -> None:
    """Raise UsageError if this model, or this thread, cannot run several forwards in turns."""
    if is_compiled(model):
        problem = "the model is compiled, and its graphs cannot pause between blocks"
    elif parts.ranks.model.size > 1:
        problem = "the model runs in tensor parallelism"
    elif (name := _hooked(model)) is not None:
        problem = f"{name or 'the model'} has hooks, which would run in another order"
    elif not _is_plain_thread(parts.device):
        problem = (
            "it was called in a context of this thread (autocast, no_grad, a mode, saved-tensor hooks or a stream), "
            "which the threads of the micro-batches do not have"
        )
    else:
        return
    raise UsageError(f"engine.train_batch(blocks=...): {problem}. Change that, or leave blocks out.")


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_STATELESS = frozenset({"transformers.modeling_utils"})
"""Modules whose hooks on a model depend on their arguments only, as `enable_input_require_grads`."""


def _hooked(model: nn.Module) -> str | None:
    """Return the name of a module or parameter with hooks that may have a state; "" for all modules, None if there are
    none.
    """
    with torch._C.DisableTorchFunctionSubclass():  # which would fetch parameters
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:  # one is the engine's
                return name
    if any(getattr(torch_module, f"_global{name}") for name in _HOOKS):
        return ""
    for name, module in model.named_modules():
        for hooks in (getattr(module, kind) for kind in _HOOKS):
            if any(getattr(hook, "__module__", None) not in _STATELESS for hook in hooks.values()):
                return str(name)
    return None


def _is_plain_thread(device: Device) -> bool:
    """Return whether another thread would compute as this one does, in a context of `Device.like_this_thread`."""
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    if modes != (device.modes, device.function_modes):
        return False
    kinds = filter(torch.amp.is_autocast_available, ("cpu", device.torch_device.type))
    if any(map(torch.is_autocast_enabled, kinds)) or torch.is_inference_mode_enabled():
        return False
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return topmost_hooks(True) is None


class RandomState:
    """The present state of the generators of torch, Python and numpy. device: torch's device of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = list(_generators(device))

    def moved(self) -> bool:
        """Return whether a generator has drawn numbers since."""
        present = [key for key, _ in _generators(self._device)]
        return present != [key for key, _ in self._states]

    def restore(self) -> None:
        for _, restore in self._states:
            restore()


def _generators(device: torch.device) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield the state of each generator, and the function that restores it."""
    host = torch.get_rng_state()
    yield host.numpy().tobytes(), lambda: torch.set_rng_state(host)
    if device.type not in ("cpu", "meta"):
        module: Any = getattr(torch, device.type)
        there = module.get_rng_state(device)
        yield there.cpu().numpy().tobytes(), lambda: module.set_rng_state(there, device)
    python = random.getstate()
    yield python, lambda: random.setstate(python)
    if (numpy := sys.modules.get("numpy")) is not None:
        arrays: Any = numpy.random.get_state(legacy=True)
        yield (arrays[1].tobytes(), arrays[2:]), lambda: numpy.random.set_state(arrays)

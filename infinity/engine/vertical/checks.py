"""Checks of what `engine.train_batch(blocks=...)` is called with, before anything runs, and of random numbers.

Draws the micro-batches of a step, and computes their losses.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from infinity.engine.parts import EngineParts
from infinity.engine.vertical.pieces import refused
from infinity.errors import ModelError, UsageError
from infinity.model.saved import topmost_hooks
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
_STATELESS = frozenset({"transformers.modeling_utils", "infinity.model.bitsandbytes"})
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


LossFunction = Callable[[Any, Any], torch.Tensor]
"""(output of the model, micro-batch) → loss."""


def draw(batches: Iterator[Any], count: int) -> list[Any]:
    """Draw the micro-batches of a step. Raises UsageError if there are fewer, or if one was written over another."""
    if not isinstance(batches, Iterator):
        raise UsageError(
            f"engine.train_batch() takes an iterator, which continues in the next step, not a "
            f"{type(batches).__name__}: pass iter(loader), made once"
        )
    drawn: list[Any] = []
    contents: list[_Contents] = []
    for batch in batches:
        drawn.append(batch)
        if len(drawn) < count:
            contents.append(_Contents(batch))
            continue
        if any(each.changed() for each in contents):
            raise UsageError(
                "the iterator of engine.train_batch() wrote a micro-batch over an earlier one of the same step. All of "
                "them are drawn before the first one runs: yield new tensors and containers, or copies (clone())."
            )
        return drawn
    raise UsageError(
        f"the iterator of engine.train_batch() ended after {len(drawn)} of {count} micro-batches "
        "(gradient_accumulation_steps). Nothing was run: make a new iterator for the next epoch, or repeat the data."
    )


class _Contents:
    """The leaves of a micro-batch, and copies of its tensors: numpy and other processes write without a version."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._leaves = _leaves(batch)
        self._copies = [(tensor, tensor.clone()) for tensor in _tensors(self._leaves)]

    def changed(self) -> bool:
        present = _leaves(self._batch)
        if len(present) != len(self._leaves) or any(a is not b for a, b in zip(present, self._leaves, strict=True)):
            return True
        return any(not torch.equal(_bits(tensor), _bits(copy)) for tensor, copy in self._copies)


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return tree_leaves(dict(batch))  # of transformers' BatchEncoding, which is no dict
    if type(batch).__module__ != "builtins" and isinstance(getattr(batch, "__dict__", None), dict):
        return [*tree_leaves(batch), *tree_leaves(vars(batch))]
    return tree_leaves(batch)


def _tensors(leaves: list[Any]) -> Iterator[torch.Tensor]:
    for leaf in leaves:
        if hasattr(leaf, "__array_interface__") and not isinstance(leaf, torch.Tensor):
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            yield leaf.detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Return the model's output for a batch: a mapping has keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(model: Callable[..., Any], batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Return the loss of a batch."""
    output = call(model, batch)
    if loss_fn is not None:
        return loss_fn(output, batch)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    elif not isinstance(output, torch.Tensor):
        output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return output  # type: ignore[no-any-return]


class BufferChanges:
    """The buffers of `model` that change during a step, by the stage that changes them.

    Micro-batches pass a stage one after the other, so a buffer that only one stage changes gets the values of a loop.
    Versions are compared, which edits through `.data` do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = self._versions()
        self._changed: set[str] = set()

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _changes(self) -> set[str]:
        before, self._seen = self._seen, self._versions()
        return {name for name, version in self._seen.items() if before.get(name) != version}

    def check_stage(self) -> None:
        """Raise ModelError if a buffer has changed in this stage and in an earlier one."""
        changes = self._changes()
        if twice := sorted(changes & self._changed):
            raise refused(f"several blocks change the buffer {twice[0]}, in another order than a loop")
        self._changed |= changes

    def check_backward(self) -> None:
        """Raise ModelError if a buffer has changed since the end of the forwards."""
        if changes := sorted(self._changes()):
            raise ModelError(
                f"engine.train_batch(blocks=...): the backward changes the buffer {changes[0]}, as batch normalisation "
                "in a checkpoint does, in another order than a loop. Leave blocks out: the micro-batches then run one "
                "after the other."
            )

"""Shields the engine's operations from modes of the user's code.

Dispatch and inference modes, `torch.device(...)` contexts, torch.func transforms and traces of torch.jit apply to the
model's operations only. Otherwise selective checkpointing would count the engine's operations, vmap would wrap its
buffers, sizes would be tensors, and tensors created for transfers would remain inference tensors after the mode ends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from infinity.errors import UsageError

_NOTHING: AbstractContextManager[object] = nullcontext()
_pop_mode, _push_mode = torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_FUNCTORCH = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_HOOKS_REFUSED = "don't yet support saved tensor hooks"
"""Part of the message of torch.func's error."""


def in_derivative() -> bool:
    """True if a torch.func transform other than vmap is active: its graphs do not use saved-tensor hooks.

    False in `outside_modes`, which suspends them.
    """
    if not torch._C._are_functorch_transforms_active() or _is_excluded(_FUNCTORCH):
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def transformed(name: str) -> UsageError:
    """Return the error for a torch.func derivative that needs parameters of an engine. name: parameter or unit."""
    return UsageError(
        f"a derivative by torch.func (grad, vjp, jvp, jacrev, hessian) needs parameters of an engine ({name}), whose "
        "memory is lent to other units before it is finished. Use torch.autograd.grad or torch.autograd.functional, or "
        "give torch.func.functional_call tensors of your own for all parameters (p.detach().clone())."
    )


def is_refused_derivative(error: RuntimeError) -> bool:
    """Return whether torch.func refused the saved-tensor hooks of a forward."""
    return _HOOKS_REFUSED in str(error)


def refused_derivative() -> UsageError:
    """Return the error that names what torch.func refused."""
    return UsageError(
        "a derivative by torch.func (grad, vjp, jacrev, hessian) was taken in the forward of a model that an engine "
        "has: PyTorch refuses it under saved-tensor hooks, which every forward of an engine needs. Use "
        "torch.autograd.grad(..., create_graph=True) or torch.autograd.functional."
    )


def outside_modes() -> AbstractContextManager[object]:
    """Suspend every mode of this thread in the block. Costs a microsecond if no mode is active."""
    dispatch, function = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    transforms, inference = torch._C._are_functorch_transforms_active(), torch.is_inference_mode_enabled()
    trace = torch._C._get_tracing_state()
    # The usual case, which every operation of the engine pays for.
    if not (function or transforms or inference or trace):
        return _without_dispatch() if dispatch else _NOTHING
    suspended = ExitStack()
    if trace:
        set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
        set_trace(None)
        suspended.callback(set_trace, trace)
    if inference:
        suspended.enter_context(torch.inference_mode(False))
    if transforms:
        suspended.enter_context(torch._C._DisableFuncTorch())
    if function:
        suspended.enter_context(torch._C.DisableTorchFunction())
    if dispatch:
        suspended.enter_context(_without_dispatch())
    return suspended


def _without_dispatch() -> AbstractContextManager[object]:
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return _disable_current_modes()  # an export, which has modes on a stack of their own
    return _WithoutDispatch()


class _WithoutDispatch(AbstractContextManager[object]):
    """Suspends dispatch modes as torch's `_disable_current_modes` does, whose checks take several times as long."""

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        self._modes = [_pop_mode(None) for _ in range(torch._C._len_torch_dispatch_stack())]

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            _push_mode(mode)

"""Modes of the user's code (dispatch and inference modes, `torch.device(...)` contexts, torch.func transforms) see the
model's operations and must not see ours: selective checkpointing would count them, vmap would wrap our buffers, and
tensors that move buffers outlive an inference mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from infinity.errors import UsageError

_NOTHING: AbstractContextManager[object] = nullcontext()
_HOOKS_REFUSED = "don't yet support saved tensor hooks"
"""In the error of torch.func."""


def in_derivative() -> bool:
    """Whether a transform of torch.func but vmap is active: its graphs are its own, without saved-tensor hooks."""
    if not torch._C._are_functorch_transforms_active():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def transformed(name: str) -> UsageError:
    """name: of a unit whose parameters a derivative of torch.func needs."""
    return UsageError(
        f"a derivative by torch.func (grad, vjp, jvp, jacrev, hessian) needs the parameters of {name}, whose memory an "
        "engine lends to other units before it is finished. Use torch.autograd.grad or torch.autograd.functional, or "
        "give torch.func.functional_call tensors of your own for all parameters (p.detach().clone())."
    )


def named_refusal(error: RuntimeError) -> RuntimeError:
    """UsageError in the place of PyTorch's, where torch.func refused the saved-tensor hooks of a forward."""
    if _HOOKS_REFUSED not in str(error):
        return error
    return UsageError(
        "a derivative by torch.func (grad, vjp, jacrev, hessian) was taken in the forward of a model that an engine "
        "has: PyTorch refuses it under saved-tensor hooks, which every forward of an engine needs. Use "
        "torch.autograd.grad(..., create_graph=True) or torch.autograd.functional."
    )


def outside_modes() -> AbstractContextManager[object]:
    """Suspend every mode of this thread in the block; nothing, at the cost of a microsecond, where there is none."""
    dispatch, function = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    transforms, inference = torch._C._are_functorch_transforms_active(), torch.is_inference_mode_enabled()
    if not (dispatch or function or transforms or inference):
        return _NOTHING
    suspended = ExitStack()
    if inference:
        suspended.enter_context(torch.inference_mode(False))
    if transforms:
        suspended.enter_context(torch._C._DisableFuncTorch())
    if function:
        suspended.enter_context(torch._C.DisableTorchFunction())
    if dispatch:
        suspended.enter_context(_disable_current_modes())
    return suspended

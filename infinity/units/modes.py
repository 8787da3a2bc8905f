"""Modes of the user's code (dispatch and inference modes, `torch.device(...)` contexts, torch.func transforms) see the
model's operations and must not see ours: selective checkpointing would count them, vmap would wrap our buffers, and
tensors that move buffers outlive an inference mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING: AbstractContextManager[object] = nullcontext()


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

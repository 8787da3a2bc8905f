"""Reads and edits single parameters, gradients and optimizer states under DeepSpeed's names. All are collective.

A parameter that is frozen or belongs to no open engine has no fp32 copy: the functions return None or change nothing,
as DeepSpeed's do. Values are on the device that the model computes on. The local functions read and edit this
rank's part in DeepSpeed's layout of stage 3: the flat parameter in equal parts, the last one padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import infinity.engine.gather as gather
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of `param`, unsharded; None if it is not trained."""
    engine = _trained(param)
    return None if engine is None else gather.get_full_fp32_param(param).to(engine.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master of `param`, and the parameter to its rounded value."""
    if _trained(param) is not None:
        gather.set_full_fp32_param(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a moment such as `exp_avg` in fp32, unsharded; None if `param` is not trained."""
    engine = _trained(param)
    return None if engine is None else gather.get_full_optimizer_state(param, optim_state_key).to(engine.device)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a moment of `param`."""
    if _trained(param) is not None:
        gather.set_full_optimizer_state(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the step's gradient in fp32, the mean over ranks and micro-batches, before clipping; None without one.

    Call it between the last backward of a step and `step`.
    """
    engine = _trained(param)
    value = None if engine is None else gather.get_full_grad(param)
    return None if engine is None or value is None else value.to(engine.device)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the step's gradient; see `safe_get_full_grad`."""
    if _trained(param) is not None:
        gather.set_full_grad(param, value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by `update_func(gradient, parameter)`."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master of `param`, flat."""
    return _part(param, safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the fp32 master. All ranks must call it."""
    _set_local(param, value, safe_set_full_fp32_param)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a moment, flat."""
    return _part(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a moment. All ranks must call it."""
    _set_local(param, value, safe_set_full_optimizer_state, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the step's gradient, flat; None without one."""
    return _part(param, safe_get_full_grad(param))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the step's gradient. All ranks must call it."""
    _set_local(param, value, safe_set_full_grad)


def _trained(param: nn.Parameter) -> TrainingEngine | None:
    """Return the open engine that trains `param`; None for other parameters."""
    found = gather._find(param)
    if found is None or not isinstance(found[0], TrainingEngine):
        return None
    return found[0] if found[1].layout.trainable and param.requires_grad else None


def _stage3(param: nn.Parameter) -> TrainingEngine | None:
    """Return `_trained(param)`. Raises UsageError below stage 3, where DeepSpeed has no local parts either."""
    engine = _trained(param)
    if engine is not None and engine.config.zero_optimization.stage < 3:
        raise UsageError(
            "local parts exist only in stage 3, and zero_optimization.stage is "
            f"{int(engine.config.zero_optimization.stage)}: call the function with full in its name instead of local"
        )
    return engine


def _part(param: nn.Parameter, whole: torch.Tensor | None) -> torch.Tensor | None:
    engine = _stage3(param)
    if engine is None or whole is None:
        return None
    length = -(-whole.numel() // engine.ranks.size)
    padded = torch.zeros(length * engine.ranks.size, dtype=whole.dtype, device=whole.device)
    padded[: whole.numel()] = whole.flatten()
    return padded[engine.ranks.rank * length :][:length].clone()


def _set_local(param: nn.Parameter, value: torch.Tensor, set_full: Callable[..., None], *key: str) -> None:
    """Join the parts of all ranks to one tensor in the shape of `param`, and pass it to `set_full`."""
    engine = _stage3(param)
    if engine is None:
        return
    length = -(-param.numel() // engine.ranks.size)
    flat = value.detach().flatten().cpu().float()
    if flat.numel() != length:
        raise UsageError(
            f"the value has {flat.numel()} elements, and this rank's part of a parameter of shape {list(param.shape)} "
            f"has {length}: pass a value like that of the local get function"
        )
    parts: list[torch.Tensor] = engine.ranks.gather(flat)
    set_full(param, torch.cat(parts)[: param.numel()].view(param.shape), *key)

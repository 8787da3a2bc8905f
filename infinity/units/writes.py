"""Finds the parameters that an operation writes, and hooks that may write some during a backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_IN_PLACE = re.compile(
    r"(?!__).*_$|__i(add|and|div|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor)__$|__set(item)?__$"
)
"""Names of operations that write their first argument: `add_`, `_foreach_add_`, `__iadd__`, `w[0] = …`, `.data = …`."""


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `func`, an operation on tensors, writes."""
    schema = getattr(func, "_schema", None)
    if schema is not None:  # an operator of torch.ops
        writes = [place.alias_info is not None and place.alias_info.is_write for place in schema.arguments]
        names = [place.name for place, is_write in zip(schema.arguments, writes, strict=True) if is_write]
        given = [value for value, is_write in zip(args, writes, strict=False) if is_write]
        return [*given, *(kwargs[name] for name in names if name in kwargs)]
    # Functions of the Python interface have no schema, so the name has to tell.
    in_place = _IN_PLACE.match(getattr(func, "__name__", "")) is not None
    return [*(args[:1] if in_place else ()), kwargs.get("out")]


def has_backward_hooks(model: nn.Module) -> bool:
    """Return whether modules or parameters of `model`, or all modules, have hooks that run in backward."""
    torch_module = nn.modules.module
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return True
    with torch._C.DisableTorchFunctionSubclass():  # which would fetch parameters
        for parameter in model.parameters():
            if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:  # one is the engine's
                return True
    return any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())

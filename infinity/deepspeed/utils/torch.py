"""Functions of `deepspeed.utils.torch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return True if torch's version lies in these bounds, inclusive. At least one is needed."""
    assert min_version or max_version, "Must provide a min_version or max_version argument"
    version: Any = torch.__version__  # compares as a version with text
    return (not min_version or version >= str(min_version)) and (not max_version or version <= str(max_version))


def register_grad_hook(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Return the handle of `hook`, which is called with `param` when its gradient is accumulated."""
    return param.register_post_accumulate_grad_hook(hook)


def is_functorch_transforming() -> bool:
    """Return True in a function that torch.func transforms, such as by `grad` or `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None

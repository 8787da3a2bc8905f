"""The saved-tensor hooks that are in effect in this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["topmost_hooks"]

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack and unpack."""

topmost_hooks: Callable[[bool], Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the topmost hooks of this thread, or None. Argument: True returns them while Dynamo traces, too."""

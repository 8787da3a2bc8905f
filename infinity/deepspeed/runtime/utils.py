"""Functions that scripts import from `deepspeed.runtime.utils`."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_map_only

from infinity.observe.log import logger


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return `item` with its tensors on `device`, in lists, tuples and dicts too.

    criterion_func: moves only tensors for which it returns True.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return tree_map_only(torch.Tensor, move, item)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the process's resident memory, if `force` is True and this is rank 0."""
    if not force or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    memory = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    logger.info("%s: %.2f GB resident, %.0f %% of host memory used", message, resident / 1e9, memory.percent)

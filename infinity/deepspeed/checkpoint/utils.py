"""Functions that libraries import from `deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return `item` with copies of its tensors on `device`, each with a storage of its own size."""
    device = torch.device(device)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone().to(device), item)

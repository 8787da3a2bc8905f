"""Names of `deepspeed.git_version_info`: versions and compiled operators."""

from __future__ import annotations

from typing import Any

import torch

import infinity.deepspeed as root
from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.op_builder import compatible_ops

version = root.__version__
git_hash = root.__git_hash__
git_branch = root.__git_branch__
accelerator_name = get_accelerator().device_name()
installed_ops = compatible_ops
"""Operator → True if it is part of this installation, which needs no compiler."""


_nccl: Any = torch.cuda.nccl.version() if torch.cuda.is_available() else (0, 0)
torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, _nccl[:2])),
    "hip_version": torch.version.hip or "0.0",
}
"""Versions of the torch that runs, where DeepSpeed has those of the torch that it was compiled with."""

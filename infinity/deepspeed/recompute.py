"""`deepspeed.checkpointing` over torch.utils.checkpoint, which fetches a block's units again when it recomputes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from infinity.errors import UsageError

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` without saving its activations; backward recomputes them. Returns its outputs.

    Uses torch's non-reentrant variant, which gives the same gradients, and restores the RNG states.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's settings that are off. `num_checkpoints`, `synchronize` and `profile` have no effect.

    Raises UsageError for partitioned, contiguous or offloaded activations, and for model parallelism.
    """
    global _configured
    wanted = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    for name in (name for name, value in wanted.items() if value):
        raise UsageError(
            f"checkpointing.configure({name}=True) is not supported: leave it out. To move the inputs of blocks to "
            'host memory or disk, set infinity.activations.device to "cpu" or "nvme" in the config of initialize'
        )
    size = mpu_.get_model_parallel_world_size() if mpu_ is not None else 1
    if size > 1:
        raise UsageError(f"mpu has {size} model-parallel ranks: use torch.distributed.tensor.parallel")
    _configured = True


def is_configured() -> bool:
    """Return True after `configure`."""
    return _configured


def reset() -> None:
    """Do nothing: activations are freed by autograd, and no buffers are kept between steps."""

"""Modules that scripts import from `deepspeed.runtime`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(
    __name__,
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "config_utils",
    "constants",
    "dataloader",
    "engine",
    "lr_schedules",
    "pipe",
    "precision_config",
    "sequence_parallel",
    "swap_tensor",
    "utils",
    "zero",
)

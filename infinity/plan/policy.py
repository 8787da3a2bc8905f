"""Translates a config into tiers and formats of states, and the update schedule. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from infinity.config import Config
from infinity.plan.formats import state_format
from infinity.plan.grad_dtypes import grad_dtypes
from infinity.plan.placement import Policy
from infinity.plan.stage import Sharding

TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
"""Name of a device in the config → tier."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a dtype in the config → dtype."""


@dataclass(frozen=True)
class RankInfo:
    """The data-parallel ranks, as far as a plan depends on them."""

    size: int = 1
    shards: int = 1
    """Number of shards of a unit: `size` or 1."""
    backend: str = ""
    """Backend of torch.distributed; empty if nothing is exchanged, since there is no process group."""


def update_schedule(config: Config) -> str:
    """Return the update schedule. `auto` is "next_forward" with clipping or fp16, which need the norm of all gradients
    before the first update; otherwise "during_backward".
    """
    if config.infinity.update == "auto":
        global_first = config.gradient_clipping > 0 or config.fp16.enabled
        return "next_forward" if global_first else "during_backward"
    return config.infinity.update


def policy(config: Config, accumulation: int, ranks: RankInfo) -> Policy:
    """Return the tier and format of each state. Gradients are stored in the tier of the optimizer states."""
    zero = config.zero_optimization
    sharding = Sharding.of(zero.stage)
    optim_tier = TIERS[zero.offload_optimizer.device]
    whole = not sharding.grads and accumulation > 1
    return Policy(
        param_tier=TIERS[zero.offload_param.device],
        optim_tier=optim_tier,
        grad_tier=optim_tier,
        grads=partial(
            grad_dtypes,
            communication=_communication(config, ranks),
            accumulation=DTYPES[config.data_types.grad_accum_dtype],
            micro_batches=accumulation,
            exchanged=bool(ranks.backend),
            whole=whole,
        ),
        states=partial(
            state_format,
            master=config.infinity.master,
            rule=config.optimizer.rule,
            moments=config.infinity.moments,
        ),
        tile_size=config.infinity.tile_size,
        resident=not sharding.params,
        grads_whole=whole,
    )


def _communication(config: Config, ranks: RankInfo) -> torch.dtype | None:
    """Return the dtype of the sum of gradients over ranks; None: their own dtype."""
    if config.communication_data_type is not None:
        return DTYPES[config.communication_data_type]
    return torch.float32 if ranks.backend == "gloo" else None


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of all floating parameters in training; None: their present dtypes."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None

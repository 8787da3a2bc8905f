"""Functions of `deepspeed.moe.utils`, for models without expert parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from infinity.deepspeed.absent import EXPERTS
from infinity.errors import UsageError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): there are no layers of DeepSpeed's class MoE."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Return True if the script marked `param` as an expert of a single rank, by `param.allreduce = False`."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters that are no experts, and those that are."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return `param_groups` as a list. Raises UsageError if one has experts of a single rank."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise UsageError(f"parameters are marked by allreduce = False, which has no counterpart in Infinity: {EXPERTS}")
    return groups


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True if `param_group` is marked as one of experts."""
    return bool(param_group.get("moe"))

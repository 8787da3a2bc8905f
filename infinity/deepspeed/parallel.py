"""Names of DeepSpeed's modules of groups, sequences, experts, tensor parallelism and elasticity.

All ranks are data-parallel, so every other group has one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from infinity.deepspeed import comm
from infinity.deepspeed.tree import EXPERTS, SEQUENCE
from infinity.errors import ConfigError, UsageError


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


get_data_parallel_group = comm.get_world_group
get_data_parallel_world_size = get_sequence_data_parallel_world_size = comm.get_world_size
get_data_parallel_rank = get_sequence_data_parallel_rank = comm.get_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size = get_sequence_parallel_world_size = _one
get_tensor_model_parallel_rank = get_model_parallel_rank = get_sequence_parallel_rank = _zero


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Accept a size of 1. Raises UsageError for others."""
    if sequence_parallel_size != 1:
        raise UsageError(
            f"sequence_parallel_size is {sequence_parallel_size}: pass 1, or {SEQUENCE} in the model, and pass "
            "process_group to infinity.initialize()"
        )


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


class GatherReplacedLayerParams:
    """A block without effect: it gathers parameters of replaced layers, of which there are none."""

    def __init__(self, params: Any, module: nn.Module, enabled: bool = True) -> None:
        self.module = module
        self.enabled = False
        """As in DeepSpeed for parameters of layers that are not replaced."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class ElasticityError(ConfigError):
    pass


class ElasticityConfigError(ElasticityError):
    pass


class ElasticityIncompatibleWorldSize(ElasticityError):
    pass


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the config has a section `elasticity` that is enabled, which `initialize` refuses."""
    section = ds_config.get("elasticity")
    return bool(section.get("enabled", False)) if isinstance(section, Mapping) else False


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> NoReturn:
    """Raise ElasticityError, since no batch sizes are chosen here."""
    raise ElasticityError(
        f"elasticity is {ds_config.get('elasticity')!r:.200}, and Infinity chooses no batch sizes: set "
        "train_batch_size and gradient_accumulation_steps, and restart on another number of ranks from a checkpoint"
    )

"""Names of `deepspeed.elasticity`, which chooses batch sizes that many numbers of ranks divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from infinity.errors import ConfigError


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

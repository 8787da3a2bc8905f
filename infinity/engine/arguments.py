"""Arguments of `infinity.initialize` that scripts for DeepSpeed pass, and the command line's flags."""

from __future__ import annotations

import argparse
from os import PathLike
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.config import Config

    ConfigSource = Config | dict[str, Any] | str | PathLike[str]

_MODEL_PARALLEL = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
    "get_expert_model_parallel_world_size",
)
"""Methods of an `mpu` (Megatron's and DeepSpeed's) that return a number of ranks which share one copy of the model."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's flags to `parser`, and return it. Pass the parsed arguments as `args` to `infinity.initialize`.

    `--deepspeed` and `--deepscale` are for the script itself and have no effect on the engine. `--deepspeed_config` is
    the path of the config; `--deepscale_config` is its old name.
    """
    group = parser.add_argument_group("DeepSpeed", "flags of DeepSpeed, which Infinity reads")
    group.add_argument("--deepspeed", action="store_true", help="a switch for the script; no effect on the engine")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="old name of --deepspeed_config")
    return parser


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the config among the arguments of `initialize`. Raises ConfigError if there is none, or several.

    args: has `deepspeed_config` or `deepscale_config`, as after `add_config_arguments`.
    """
    sources: dict[str, Any] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    passed = {name: source for name, source in sources.items() if source is not None}
    if not passed:
        raise ConfigError(
            "there is no config: pass config, a dict or the path of a JSON file, or args with deepspeed_config "
            "(infinity.add_config_arguments(parser))"
        )
    first, *others = passed.values()
    if any(other != first for other in others):
        raise ConfigError(f"{' and '.join(passed)} are different configs: pass only one")
    return first


def load_config(source: ConfigSource) -> Config:
    """Return the configuration in `source`. Raises ConfigError."""
    from infinity.config import Config  # here, since pydantic takes as long to import as the engine

    return Config.load(source)


def check_mpu(mpu: Any) -> None:
    """Raise ConfigError if `mpu` divides the model among ranks. Sizes of 1 are accepted."""
    if mpu is None:
        return
    for name in _MODEL_PARALLEL:
        method = getattr(mpu, name, None)
        size = method() if callable(method) else 1
        if size != 1:
            raise ConfigError(
                f"mpu.{name}() is {size}: an engine does not read mpu. For tensor parallelism, make the parameters "
                "DTensors (torch.distributed.tensor.parallel.parallelize_module) and leave mpu out; pipeline, "
                "sequence and expert parallelism are not supported"
            )

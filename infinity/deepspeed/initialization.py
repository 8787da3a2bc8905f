"""DeepSpeed's `initialize`, `init_inference` and `add_config_arguments`, with its arguments in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import infinity.deepspeed as root
import infinity.engine.initialize as engines
from infinity.deepspeed.built import forget
from infinity.deepspeed.comm import init_distributed
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.front_ends import check_processes
from infinity.deepspeed.helpers import log_dist
from infinity.deepspeed.launcher.flags import DEFAULT_PORT
from infinity.deepspeed.module import EngineModule
from infinity.deepspeed.parameter_names import answer
from infinity.deepspeed.settings import (
    FailedModelCheck,
    config_checks,
    in_dtype_of,
    make_config,
    read_settings,
    tag_validation,
)
from infinity.deepspeed.tree import TENSOR_PARALLEL
from infinity.deepspeed.zero_init import outside_of_init
from infinity.engine import schedules
from infinity.engine.arguments import add_config_arguments, check_mpu, config_source
from infinity.engine.base import open_engines
from infinity.engine.describe import kept, left_under_limit, summarize
from infinity.engine.inference import InferenceEngine
from infinity.engine.optimizer.unit_optimizer import ParamGroups
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, ModelError
from infinity.observe.log import log_summary, logger, show_by_default
from infinity.units.compiled import uncompiled

if TYPE_CHECKING:
    from infinity.config import Config

__all__ = ["add_config_arguments", "init_inference", "initialize", "tp_model_init"]


@outside_of_init()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: ParamGroups | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Construct an engine that trains `model`, and return (engine, optimizer, dataloader, lr scheduler).

    Without an optimizer, `training_data` or a scheduler, the respective result is None. Without an optimizer the engine
    only runs the model. An open engine of `model` is closed, and the new one continues from its values.

    args: an object with `deepspeed_config`, the path of a config, as `add_config_arguments` parses it. config,
    config_params: the config as a dict or a path, instead of `args`. distributed_port: port of rank 0 if MASTER_PORT is
    not set. mpu: must have one model-parallel rank. dist_init_required: False: the script has called
    init_process_group; by default it is called if needed, and for one rank too.

    Raises ConfigError, ModelError and UsageError, and the errors of `infinity.initialize`.
    """
    if model is None:
        raise FailedModelCheck("initialize() has no model: pass model=, a torch.nn.Module")
    if isinstance(model, EngineModule):
        raise ModelError("model is already an engine: call engine.destroy(), and pass engine.module")
    check_mpu(mpu)
    if mesh_param is not None:
        raise ConfigError("mesh_param is for sequence parallelism, which has no counterpart here: leave it out")
    settings = read_settings(config_source(args, config, config_params))
    tag_validation(settings)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    check_processes()
    show_by_default()
    version = f"version={root.__version__}, git-hash={root.__git_hash__}, git-branch={root.__git_branch__}"
    log_dist(f"DeepSpeed info: {version}", ranks=[0])  # tests of libraries look for this line
    _take_from_engine(model)
    trains = optimizer is not None or settings.get("optimizer") is not None
    config_of_model = make_config(in_dtype_of(model, settings) if trains else settings, model)
    engine = _make_engine(model, config_of_model, optimizer, model_parameters, lr_scheduler)
    try:
        wrapped = DeepSpeedEngine(engine, settings, training_data, collate_fn, optimizer)
    except BaseException:
        engine.close()
        raise
    if engine.ranks.is_main_rank:
        plan = engine.parts.plan
        head = f"states of {type(uncompiled(model)).__name__}"
        lines = [head, summarize(plan), *kept(config_of_model, plan), *left_under_limit(plan)]
        if lr_scheduler is None and config_of_model.scheduler is not None:
            lines.append(f"the config's {config_of_model.scheduler.type} sets the learning rates (docs/huggingface.md)")
        log_summary("\n".join(lines))
    forget(model.parameters())
    if wrapped.zero_optimization_partition_weights():
        answer(engine)
    trained = engine.optimizer if isinstance(engine, TrainingEngine) else None
    return wrapped, trained, wrapped.training_dataloader, wrapped.lr_scheduler


def _take_from_engine(model: nn.Module) -> None:
    """Close the open engine of `model`, if there is one, and return its values to the model. Collective.

    DeepSpeed constructs a second engine in place of the first; Lightning does so for `trainer.test` after a fit.
    """
    for engine in [each for each in open_engines if each.module is uncompiled(model)]:
        if engine.ranks.is_main_rank:
            logger.info("the model's former engine is closed, and the new one has its values")
        engine.close(restore=True)


def _make_engine(
    model: nn.Module,
    config: Config,
    optimizer: Any,
    model_parameters: ParamGroups | None,
    lr_scheduler: Any,
) -> TrainingEngine | InferenceEngine:
    """Return a training engine, or one for inference if neither the arguments nor the config have an optimizer."""
    if optimizer is None and "optimizer" not in config.model_fields_set:
        logger.info("neither the arguments nor the config have an optimizer, so the engine only runs the model")
        training = model.training
        runner = engines.init_inference(model, config)
        runner.module.train(training)  # DeepSpeed leaves the mode to the script
        return runner
    if lr_scheduler is None and config.scheduler is not None:
        # DeepSpeed's schedulers begin at iteration -1.
        make: Any = getattr(schedules, config.scheduler.type)
        lr_scheduler = partial(make, **config.scheduler.params.model_dump(exclude_unset=True))
        config = config.model_copy(update={"scheduler": None})
    with config_checks():
        engine = engines.initialize(model, config, model_parameters, optimizer=optimizer, lr_scheduler=lr_scheduler)[0]
    if config.fp16.enabled:  # the scale of float16 autocast is GradScaler's in DeepSpeed, too
        engine.loss_scale.count_as_deepspeed()
    engine.parts.schedule.step.counts_calls = True  # as DeepSpeed, whose micro-batches may have several backwards
    engine.parts.schedule.step.averages_plain = True
    checks = config.bf16.enabled and config.infinity.check_nan
    engine.parts.schedule.step.skips_overflows = checks and engine.parts.plan.update != "during_backward"
    return engine


@outside_of_init()
def init_inference(
    model: nn.Module, config: Mapping[str, Any] | str | PathLike[str] | None = None, **kwargs: Any
) -> EngineModule:
    """Construct an engine that runs `model` in `dtype`, by default in float16, as in DeepSpeed.

    config, kwargs: DeepSpeed's inference config, of which `dtype` and `zero` are used. Tensor parallelism and
    quantisation are refused; kernel injection has no effect.
    """
    options = dict(read_settings(config if config is not None else {}))
    for name, value in kwargs.items():
        if name in options and options[name] != value:
            raise ConfigError(f"{name} is {options[name]!r} in config and {value!r} as argument: pass one of them")
    options |= kwargs
    dtype = _dtype(options.pop("dtype", torch.float16))
    content = {"zero_optimization": dict(options.pop("zero", None) or {"stage": 0})}
    tensor_parallel = dict(options.pop("tensor_parallel", options.pop("tp", None)) or {})
    tp_size, mp_size = tensor_parallel.get("tp_size", 1), options.pop("mp_size", 1)
    for name, size in (("tensor_parallel.tp_size", tp_size), ("mp_size", mp_size)):
        if size != 1:
            raise ConfigError(
                f"{name} is {size}: set it to 1, or use torch.distributed.tensor.parallel and pass process_group to "
                "infinity.init_inference()"
            )
    if refused := sorted(options.keys() - _NO_EFFECT):
        raise ConfigError([f"{name} is not supported in an inference config: remove it" for name in refused])
    if options:
        logger.info("init_inference: no effect here: %s", ", ".join(sorted(options)))
    engine = EngineModule(engines.init_inference(model, make_config(content, model), dtype=dtype))
    forget(model.parameters())
    return engine


_NO_EFFECT = {
    "replace_with_kernel_inject",
    "kernel_inject",
    "replace_method",
    "enable_cuda_graph",
    "use_triton",
    "triton_autotune",
    "max_out_tokens",
    "max_tokens",
    "min_out_tokens",
    "min_tokens",
    "transposed_mode",
    "set_empty_params",
    "save_mp_checkpoint_path",
    "return_tuple",
}
"""Keys of DeepSpeed's inference config that select kernels or buffers."""


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Return `model` for a `tp_size` of 1. Raises ConfigError for others, since the model is not divided here."""
    if tp_size != 1:
        raise ConfigError(f"tp_model_init(tp_size={tp_size}) has no counterpart in Infinity: {TENSOR_PARALLEL}")
    return model


def _dtype(value: Any) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    for dtype, names in _DTYPES.items():
        if name in names:
            return dtype
    raise ConfigError(f"dtype is {value!r}: use torch.float16, torch.bfloat16 or torch.float32")


_DTYPES = {
    torch.float32: ("float32", "fp32", "float"),
    torch.float16: ("float16", "fp16", "half"),
    torch.bfloat16: ("bfloat16", "bf16"),
}

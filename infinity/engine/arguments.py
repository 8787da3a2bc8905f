"""Arguments of `infinity.initialize` that scripts for DeepSpeed pass, and the command line's flags.

Rejects models that an engine cannot manage: wrappers, TorchScript, lazy modules, parameters without memory of their
own (quantised, sparse), and objects of other types.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.comm.dtensor import is_dense, is_plain, local
from infinity.errors import ConfigError, ModelError

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


def set_port(port: int | None) -> None:
    """Set MASTER_PORT to `port`, unless the launcher has set it."""
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))


def check_model(model: Any) -> None:
    """Raise ModelError unless `model` is an `nn.Module` whose parameters an engine can manage."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(f"model is the class {model.__name__}: pass an instance of it, {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {_described(model)}: pass a torch.nn.Module")
    for name, module in model.named_modules():
        for refuses, text in _REFUSED:
            if refuses(module):
                kind = type(module).__name__
                raise ModelError(f"{f'module {name}' if name else 'the model'} is a {kind}: {text}")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            owner = model.get_submodule(name.rpartition(".")[0])
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ModelError(
                f"{kind} {name} of a {type(owner).__name__} has no shape before the first forward: run one, "
                "model(*batch), before you pass the model to the engine"
            )
    for name, parameter in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():
            problem = _not_dense(parameter)
        if problem is not None:
            kind, conversion = problem
            raise ModelError(
                f"parameter {name} is a {kind}, and an engine stores dense tensors only: load the model without "
                f"quantisation or sparsity, or replace the parameter by {conversion.format(name)}. To save memory, "
                "move dense weights to the host or to NVMe (zero_optimization.offload_param)."
            )


def _not_dense(parameter: torch.Tensor) -> tuple[str, str] | None:
    """Return (kind, template of a conversion) of a parameter that is no strided tensor in its own memory; else None."""
    values = local(parameter)
    dequantized = "nn.Parameter({}.dequantize(), requires_grad=False)"
    if values.layout is not torch.strided:
        return f"tensor of layout {values.layout}", "nn.Parameter({}.to_dense())"
    if values.is_quantized:
        return f"quantised tensor ({values.dtype})", dequantized
    if is_dense(values):
        return None
    plain = "an nn.Parameter of a plain tensor"
    if is_plain(values):
        return "tensor without memory of its own", plain
    kind = f"{type(values).__module__}.{type(values).__qualname__}, a tensor subclass without memory of its own"
    quantised = type(values).dequantize is not torch.Tensor.dequantize
    return ("" if values is parameter else "DTensor of a ") + kind, dequantized if quantised else plain


def _described(value: object) -> str:
    if isinstance(value, str):
        return f"the string {value!r}"
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def _is_fsdp(module: nn.Module) -> bool:
    library: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    kinds = (getattr(library, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return any(kind is not None and isinstance(module, kind) for kind in kinds)


def _is_replicate(module: nn.Module) -> bool:
    library: Any = sys.modules.get("torch.distributed._composable.contract")
    return library is not None and "replicate" in (library._get_registry(module) or ())


_INSTEAD = "An engine reduces gradients over ranks and shards states itself"
_REFUSED: tuple[tuple[Callable[[nn.Module], bool], str], ...] = (
    (
        _is_script,
        "TorchScript reads its parameters without the Python hooks in which an engine fetches them. Pass the module "
        "that was scripted or traced.",
    ),
    (_is_wrapper, f"{_INSTEAD}: pass the module that it wraps (.module)."),
    (
        _is_fsdp,
        f"{_INSTEAD} (zero_optimization.stage): pass the original model, without FullyShardedDataParallel or "
        "fully_shard.",
    ),
    (_is_replicate, f"{_INSTEAD}: pass the original model, without replicate()."),
)

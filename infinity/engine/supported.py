"""Rejects models that an engine cannot manage: wrappers, TorchScript, lazy modules, and objects of other types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.errors import ModelError


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

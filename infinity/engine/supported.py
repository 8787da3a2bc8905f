"""Rejects models that an engine cannot manage: wrappers, TorchScript, lazy modules, parameters without memory of their
own (quantised, sparse), and objects of other types.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.comm.dtensor import is_dense, is_plain, local
from infinity.errors import ModelError
from infinity.units.stored import is_wrapper, problem_of


def check_model(model: Any) -> None:
    """Raise ModelError unless `model` is an `nn.Module` whose parameters an engine can manage."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(f"model is the class {model.__name__}: pass an instance of it, {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        kind = f"a {type(model).__module__}.{type(model).__qualname__}"
        given = f"the string {model!r}" if isinstance(model, str) else "None" if model is None else kind
        raise ModelError(f"model is {given}: pass a torch.nn.Module")
    for name, module in model.named_modules():
        if (reason := _refusal(module)) is not None:
            kind = type(module).__name__
            raise ModelError(f"{f'module {name}' if name else 'the model'} is a {kind}: {reason}")
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
            if is_wrapper(parameter):
                _check_wrapper(name, parameter)
                continue
            problem = _not_dense(parameter)
        if problem is not None:
            kind, conversion = problem
            raise ModelError(
                f"parameter {name} is a {kind}, and an engine stores dense tensors only: load the model without "
                f"quantisation or sparsity, or replace the parameter by {conversion.format(name)}. To save memory, "
                "move dense weights to the host or to NVMe (zero_optimization.offload_param)."
            )


def check_wrappers(model: nn.Module, compute: torch.dtype | None) -> None:
    """Raise ModelError if a wrapper computes in another dtype than `compute`, the engine's; None: parameters keep
    theirs.
    """
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter) and parameter.dtype.is_floating_point and compute not in (None, parameter.dtype):
            raise ModelError(
                f"parameter {name} is a {type(parameter).__name__} that computes in {parameter.dtype}, and the engine "
                f"computes in {compute}: convert the model before it is quantised, model.to({compute}), or leave "
                '"bf16" and "fp16" out of the config'
            )


def _check_wrapper(name: str, parameter: nn.Parameter) -> None:
    """Raise ModelError if an engine cannot store the inner tensors of `parameter`."""
    if reason := problem_of(parameter):
        kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
        raise ModelError(
            f"parameter {name} is a {kind} that {reason}; or replace it by {_conversion_of(parameter).format(name)}"
        )


def _conversion_of(values: torch.Tensor) -> str:
    """Return the template of a conversion of `values`, of a subclass, to an ordinary parameter."""
    quantised = type(values).dequantize is not torch.Tensor.dequantize
    return _DEQUANTIZED if quantised else _PLAIN


def _not_dense(parameter: torch.Tensor) -> tuple[str, str] | None:
    """Return (kind, template of a conversion) of a parameter that is no strided tensor in its own memory; else None."""
    values = local(parameter)
    if values.layout is not torch.strided:
        return f"tensor of layout {values.layout}", "nn.Parameter({}.to_dense())"
    if values.is_quantized:
        return f"quantised tensor ({values.dtype})", _DEQUANTIZED
    if is_dense(values):
        return None
    if is_plain(values):
        return "tensor without memory of its own", _PLAIN
    kind = f"{type(values).__module__}.{type(values).__qualname__}, a tensor subclass without memory of its own"
    return ("" if values is parameter else "DTensor of a ") + kind, _conversion_of(values)


_DEQUANTIZED = "nn.Parameter({}.dequantize(), requires_grad=False)"
_PLAIN = "an nn.Parameter of a plain tensor"
_INSTEAD = "An engine reduces gradients over ranks and shards states itself"


def _refusal(module: nn.Module) -> str | None:
    """Return why an engine cannot manage `module`; None if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "TorchScript reads its parameters without the Python hooks in which an engine fetches them. Pass the "
            "module that was scripted or traced."
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{_INSTEAD}: pass the module that it wraps (.module)."
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    kinds = (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    if any(kind is not None and isinstance(module, kind) for kind in kinds):
        return (
            f"{_INSTEAD} (zero_optimization.stage): pass the original model, without FullyShardedDataParallel or "
            "fully_shard."
        )
    composed: Any = sys.modules.get("torch.distributed._composable.contract")
    if composed is not None and "replicate" in (composed._get_registry(module) or ()):
        return f"{_INSTEAD}: pass the original model, without replicate()."
    return None

"""Inputs and precision of the forward: device, the casts of `auto_cast`, the context of `torch_autocast`.

Dtypes of a model's buffers in 16-bit training: `data_types.buffer_dtype` and `keep_in_fp32_modules`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from infinity.errors import user_level
from infinity.plan.policy import DTYPES, compute_dtype
from infinity.units.compiled import breaks_graphs, own_name
from infinity.units.stored import of_codes

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class ForwardPrecision:
    """The device of a model's inputs, and the dtypes that a config sets for its forwards."""

    device: torch.device
    """Tensors in host memory are moved here."""
    inputs: torch.dtype | None
    """Dtype to which floating-point inputs are cast; None: they stay as they are."""
    autocast: torch.dtype | None
    """Dtype of `torch.autocast` around the forward; None: the caller's context applies."""

    @classmethod
    def of(cls, config: Config, device: torch.device, dtype: torch.dtype | None) -> ForwardPrecision | None:
        """Return the precision of forwards on `device`, or None if the config changes nothing.

        dtype: that of all floating-point parameters; None: their own.
        """
        casts = any(section.enabled and section.auto_cast for section in (config.bf16, config.fp16))
        section = config.torch_autocast
        autocast = DTYPES[section.dtype] if section.enabled and section.dtype is not None else None
        if not casts and autocast is None and device.type == "cpu":
            return None
        return cls(device, dtype if casts else None, autocast)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that moves its arguments, casts the positional ones and calls `call` under autocast."""
        device, inputs, autocast = self.device, self.inputs, self.autocast

        def run(*args: Any, **kwargs: Any) -> Any:
            if device.type != "cpu":
                args, kwargs = moved(args, device), moved(kwargs, device)
            if inputs is not None:
                args = cast(args, inputs)
            if autocast is None:
                return call(*args, **kwargs)
            with torch.autocast(device.type, autocast, cache_enabled=False):  # see `Scope.enter` on the cache
                return call(*args, **kwargs)

        return breaks_graphs(run)


def emulates_bf16(device: torch.device) -> bool:
    """Return whether `device`, the current one of its type, computes bf16 by conversions, as V100 and T4 do."""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


def warn_of_emulation(config: Config, dtype: torch.dtype | None, device: torch.device) -> None:
    """Warn if a device that emulates bf16 is to compute in it. dtype: that of all floating-point parameters, if any.

    Call it before anything is allocated: warnings may be set to raise.
    """
    section = config.torch_autocast
    wanted = dtype == torch.bfloat16 or (section.enabled and section.dtype == "bf16")
    if wanted and emulates_bf16(device):
        warnings.warn(
            f"{torch.cuda.get_device_name(device)} emulates bf16: results are right, but steps are slower than in "
            'fp16. For speed, set "fp16": {"enabled": true} instead of "bf16".',
            stacklevel=user_level(),
        )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with floating-point tensors cast to `dtype`, in nested lists, tuples and dicts, too."""
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with tensors of host memory on `device`, in nested lists, tuples and dicts, too.

    Pinned memory is copied asynchronously. Scalar tensors stay: PyTorch combines them with tensors of any device.
    """
    return _mapped(value, lambda t: t.to(device, non_blocking=True) if t.is_cpu and t.dim() > 0 else t)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to all tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def cast_buffers(model: nn.Module, config: Config) -> None:
    """Cast the floating-point buffers of `model` as `data_types` of the config sets. No-op without `bf16` or `fp16`.

    Buffers stay the same objects.
    """
    dtype, section = compute_dtype(config), config.data_types
    if dtype is None:
        return
    wanted = None if section.buffer_dtype is None else DTYPES[section.buffer_dtype]
    kept = re.compile("|".join(sorted(set(_patterns(model, section.keep_in_fp32_modules, dtype)))) or "(?!)")
    named = [(own_name(name), b) for name, b in model.named_buffers(remove_duplicate=False) if b.is_floating_point()]
    of_format = {id(buffer) for module in of_codes(model) for buffer in module.buffers(recurse=False)}
    in_fp32 = {id(buffer) for name, buffer in named if kept.search(name)}
    for _, buffer in named:
        target = torch.float32 if id(buffer) in in_fp32 else wanted
        if target is not None and buffer.dtype != target and id(buffer) not in of_format:
            buffer.data = buffer.data.to(target)


def _patterns(model: nn.Module, names: Literal["auto"] | Sequence[str], dtype: torch.dtype) -> Iterator[str]:
    """Yield regular expressions for the full names of buffers to keep in fp32. `*` in a name is any text."""
    if names != "auto":
        yield from (name.replace("*", ".*") for name in names)
        return
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    for path, module in model.named_modules():
        prefix = rf"^{re.escape(own_name(path))}\..*" if path else ""
        for listed in (getattr(module, attribute, None) or () for attribute in lists):
            yield from (prefix + name.replace("*", ".*") for name in listed)

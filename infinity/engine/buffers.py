"""Dtypes of a model's buffers in 16-bit training: `data_types.buffer_dtype` and `keep_in_fp32_modules`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from infinity.plan.policy import DTYPES, compute_dtype
from infinity.units.compiled import own_name

if TYPE_CHECKING:
    from infinity.config import Config


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
    in_fp32 = {id(buffer) for name, buffer in named if kept.search(name)}
    for _, buffer in named:
        target = torch.float32 if id(buffer) in in_fp32 else wanted
        if target is not None and buffer.dtype != target:
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

"""Validates tensors for the native kernels on CPU and CUDA: flat arrays on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinity.plan.formats import BLOCK, FORMATS
from infinity.rules import RULES, MomentFormat, RuleName

if TYPE_CHECKING:
    from infinity.native._adam import DType, Format
    from infinity.rules import Hyper

__all__ = ["DTYPES", "address_of", "update_arguments"]

DTYPES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FORMAT_OF: dict[torch.dtype, MomentFormat] = {dtype: kind for kind, dtype in FORMATS.items()}
_MASTERS = (torch.int16, torch.float32)
_MOMENT_NAMES = ("moments[0]", "moments[1]")
_SCALE_NAMES = ("scales[0]", "scales[1]")


def address_of(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype, device: torch.device) -> int:
    """Return the address of a tensor that native code can use as a flat array of `numel` elements.

    Raises ValueError for another device, dtype, layout or numel.
    """
    # `is_cpu` first: it takes a tenth of the time of `tensor.device`.
    on_device = tensor.is_cpu if device.type == "cpu" else _is_on(tensor, device)
    if not on_device:
        wanted = "a CPU tensor" if device.type == "cpu" else f"tensors on one CUDA device, here {device}"
        raise ValueError(f"{name} is on {tensor.device}: pass {wanted}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: pass {' or '.join(map(str, dtypes))}")
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not contiguous: pass a dense, contiguous tensor")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel():,} elements where {numel:,} are needed: pass tensors of one size")
    return tensor.data_ptr()


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def update_arguments(
    device: torch.device,
    param: Tensor,
    master_or_remainder: Tensor | None,
    grad: Tensor,
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    hyper: Hyper,
) -> dict[str, Any]:
    """Return the keyword arguments of `_adam.update` and `_adam_cuda.update`. Raises ValueError if tensors mismatch."""
    n = param.numel()
    kind = _moment_format(hyper.rule, moments, scales)
    master = 0
    if master_or_remainder is not None:
        master = address_of("master_or_remainder", master_or_remainder, n, *_MASTERS, device=device)
    of_moments, of_scales = [], []
    for name, moment in zip(_MOMENT_NAMES, moments, strict=False):
        of_moments.append(address_of(name, moment, n, FORMATS[kind], device=device))
    for name, scale in zip(_SCALE_NAMES, scales, strict=False):
        of_scales.append(address_of(name, scale, -(-n // BLOCK), torch.uint8, device=device))
    return {
        **hyper.arguments,
        "param": address_of("param", param, n, *DTYPES, device=device),
        "master": master,
        "grad": address_of("grad", grad, n, *DTYPES, device=device),
        "moments": of_moments,
        "scales": of_scales,
        "n": n,
        "format": _format(param, master_or_remainder),
        "grad_dtype": DTYPES[grad.dtype],
        "moment_format": kind,
    }


def _format(param: Tensor, master: Tensor | None) -> Format:
    if param.dtype == torch.float32:
        if master is not None:
            raise ValueError("param is torch.float32 and its own master: pass None for master_or_remainder")
        return "fp32"
    if param.dtype == torch.float16:
        if master is None or master.dtype != torch.float32:
            raise ValueError("param is torch.float16: pass its fp32 master")
        return "master_fp16"
    if master is None:
        raise ValueError("param is torch.bfloat16: pass its int16 remainder (see split_master) or its fp32 master")
    return "remainder" if master.dtype == torch.int16 else "master"


def _moment_format(rule: RuleName, moments: Sequence[Tensor], scales: Sequence[Tensor]) -> MomentFormat:
    wanted = len(RULES[rule].moments)
    if len(moments) != wanted:
        raise ValueError(f"{rule} has {wanted} moments, not {len(moments)}: pass as many")
    kind = _FORMAT_OF.get(moments[0].dtype)
    if kind is None:
        raise ValueError(f"moments[0] is {moments[0].dtype}: pass {' or '.join(map(str, FORMATS.values()))}")
    needed = wanted if kind == "8bit" else 0
    if len(scales) != needed:
        raise ValueError(f"moments of {moments[0].dtype} have {needed} scales, not {len(scales)}: pass as many")
    return kind

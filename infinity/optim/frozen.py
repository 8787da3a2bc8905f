"""Values of frozen parameters in 8 or 4 bits (`infinity.frozen`), by torch operations: the definition of the codes.

Groups of 64 consecutive elements of a parameter share a scale, their largest magnitude. A code stands for a level from
-1 to 1, and a value is level * scale in fp32, rounded to the parameter's dtype:

    8bit  levels c / 127, c from -127 to 127
    nf4   the 16 levels of NormalFloat 4 (Dettmers et al. 2023, QLoRA)

The engine's kernels give the same bits. The scale is a value of its group, and level 1 gives it back, so quantising
dequantised values changes none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.plan.frozen import CODED_DTYPES, GROUP, FrozenFormat
from infinity.tiers.frozen import EIGHT_STEP, NF4_LEVELS

__all__ = ["dequantise", "frozen_values", "quantise"]


def quantise(weight: Tensor, format: FrozenFormat) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a parameter in fp32, bf16 or fp16: int8 (groups, 64) and its dtype (groups,).

    The last group is filled with zeros. Codes are -127 to 127, or 0 to 15 for nf4. Raises ValueError for another dtype
    or format, and for values that are not finite.
    """
    _check(format)
    if weight.dtype not in CODED_DTYPES:
        raise ValueError(f"weight is {weight.dtype}: pass a tensor in fp32, bf16 or fp16")
    if not weight.isfinite().all():
        raise ValueError("weight has values that are not finite: replace them first")
    flat = weight.detach().flatten()
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(dim=1)
    fractions = groups.float() / torch.where(scales == 0, 1.0, scales.float()).unsqueeze(1)
    if format == "8bit":
        return (fractions * 127).round().to(torch.int8), scales  # ties to the even code
    levels = NF4_LEVELS.to(weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(fractions, middles).to(torch.int8), scales  # ties to the lower level


def dequantise(codes: Tensor, scales: Tensor, shape: torch.Size | tuple[int, ...], format: FrozenFormat) -> Tensor:
    """Return the values of codes and scales, as of `quantise`, in the dtype of the scales."""
    _check(format)
    levels = (
        codes.float() * EIGHT_STEP.to(codes.device) if format == "8bit" else NF4_LEVELS.to(codes.device)[codes.int()]
    )
    values = (levels * scales.float().unsqueeze(1)).to(scales.dtype)
    return values.flatten()[: torch.Size(shape).numel()].view(shape)


def frozen_values(weight: Tensor, format: FrozenFormat) -> Tensor:
    """Return the values with which an engine computes if it stores a frozen `weight` in this format."""
    return dequantise(*quantise(weight, format), weight.shape, format)


def _check(format: str) -> None:
    if format not in ("8bit", "nf4"):
        raise ValueError(f"format is {format!r}: pass '8bit' or 'nf4'")

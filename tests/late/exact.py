"""Sums of squares on the late device, bit-identical to the host's, as CUDA's are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from infinity.update.kernels import NATIVE, SUM_TILE

_LANES = 32
"""kSumLanes in csrc/adam/types.h."""


def squares_into(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """As `infinity.update.kernels.squares_into`: tiles of `SUM_TILE`, summed in lanes, in pairs and in order."""
    for number, (start, stop) in enumerate(ranges):
        _square(out[number], values[start:stop])


def _square(out: torch.Tensor, values: torch.Tensor) -> None:
    count = -(-values.numel() // SUM_TILE)
    padded = torch.zeros(count * SUM_TILE, dtype=torch.float64, device=values.device)
    padded[: values.numel()] = values
    squares = padded.square_().view(count, SUM_TILE // _LANES, _LANES)
    lanes = squares[:, 0].clone()
    for row in range(1, SUM_TILE // _LANES):
        lanes += squares[:, row]
    half = _LANES // 2
    while half:
        lanes[:, :half] += lanes[:, half : 2 * half].clone()
        half //= 2
    out.zero_()
    for tile in range(count):
        out += lanes[tile, 0]


EXACT = replace(NATIVE, squares_into=squares_into, is_exact=lambda kind: True)
"""Kernels for gradients; those for states on the device are torch's."""

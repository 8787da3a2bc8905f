"""Optimizer steps on CUDA tensors: checked, typed calls of the native `infinity.native._adam_cuda`.

The functions of `infinity.optim.cpu_adam`, with the same bits, for contiguous tensors on one CUDA device. They launch
on the device's current stream and do not synchronise. As with torch's own operations, the caller must keep memory alive
that other streams use (`Tensor.record_stream`).

The kernels are built only for a torch with CUDA: see `available()` and `why_not()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.native.cuda import available, why_not
from infinity.optim.cpu_adam import DTYPES, address_of, update_arguments
from infinity.rules import Hyper

__all__ = ["available", "join_master", "split_master", "sum_of_squares", "sums_of_squares", "update_flat", "why_not"]


def update_flat(
    param: Tensor,
    master_or_remainder: Tensor | None,
    grad: Tensor,
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    hyper: Hyper,
    step: int,
    *,
    grad_scale: float = 1.0,
    key: int = 0,
    first: int = 0,
) -> None:
    """Execute one optimizer step in place on all n elements of `param`: see `cpu_adam.update_flat`.

    Fastest if every array begins at a multiple of 16 bytes, like slices of flat tensors at multiples of `BLOCK`.

    Raises ValueError, before any change, for tensors that do not match or numbers out of range; RuntimeError with
    CUDA's message for errors of CUDA.
    """
    device = _device("param", param)
    import infinity.native._adam_cuda as native

    given = update_arguments(device, param, master_or_remainder, grad, moments, scales, hyper)
    native.update(**given, grad_scale=grad_scale, step=step, key=key, first=first, **_where(device))


def sum_of_squares(tensor: Tensor, scale: float = 1.0, initial: float | Tensor = 0.0) -> Tensor:
    """Return initial + the sum of (scale * x)^2: fp64 scalar on the tensor's device; inf and NaN propagate.

    Gives the bits of `cpu_adam.sum_of_squares`. initial: a number, or a result of this function on the same device, so
    that a sum over many tensors does not synchronise.
    """
    n, device = tensor.numel(), _device("tensor", tensor)
    import infinity.native._adam_cuda as native

    address = address_of("tensor", tensor, n, DTYPES, device)
    start: dict[str, Any] = {"initial": initial}
    if isinstance(initial, Tensor):
        start = {"initial_at": address_of("initial", initial, 1, (torch.float64,), device)}
    tiles = torch.empty(-(-n // native.SUM_TILE), dtype=torch.float64, device=device)
    out = torch.empty((), dtype=torch.float64, device=device)
    results = {"out": address_of("out", out, 1, (torch.float64,), device), "tiles": tiles.data_ptr()}
    native.sum_of_squares(address, n, DTYPES[tensor.dtype], **results, scale=scale, **start, **_where(device))
    return out


def sums_of_squares(tensor: Tensor, ranges: Sequence[tuple[int, int]], out: Tensor) -> None:
    """Write the sum of squares of each range [start, stop) of a 1-D tensor to `out`, fp64 (ranges,) on its device.

    Each has the bits of `sum_of_squares`. One call takes less of the host's time than one for each range.
    """
    n, device = tensor.numel(), _device("tensor", tensor)
    import infinity.native._adam_cuda as native

    address = address_of("tensor", tensor, n, DTYPES, device)
    tiles = sum(-(-(stop - start) // native.SUM_TILE) for start, stop in ranges)
    scratch = torch.empty(max(tiles, 1), dtype=torch.float64, device=device)
    results = {"out": address_of("out", out, len(ranges), (torch.float64,), device), "tiles": scratch.data_ptr()}
    native.sums_of_squares(address, n, DTYPES[tensor.dtype], ranges, **results, **_where(device))


def split_master(master: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16 parameter, int16 remainder), written into `out` if given: see `cpu_adam.split_master`."""
    n, device = master.numel(), _device("master", master)
    import infinity.native._adam_cuda as native

    address = address_of("master", master, n, (torch.float32,), device)
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    param, remainder = out
    native.split(
        address,
        address_of("param", param, n, (torch.bfloat16,), device),
        address_of("remainder", remainder, n, (torch.int16,), device),
        n,
        **_where(device),
    )
    return param, remainder


def join_master(param: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """Join (bf16 parameter, int16 remainder) to the original fp32, written into `out` if given."""
    n, device = param.numel(), _device("param", param)
    import infinity.native._adam_cuda as native

    high = address_of("param", param, n, (torch.bfloat16,), device)
    low = address_of("remainder", remainder, n, (torch.int16,), device)
    master = torch.empty_like(param, dtype=torch.float32) if out is None else out
    native.join(high, low, address_of("master", master, n, (torch.float32,), device), n, **_where(device))
    return master


def _device(name: str, tensor: Tensor) -> torch.device:
    """Return the CUDA device of `tensor`, on which the other tensors must be too. Raises ValueError without one."""
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} is on {tensor.device}: pass a CUDA tensor")
    return tensor.device


def _where(device: torch.device) -> dict[str, Any]:
    return {"device": device.index, "stream": torch.cuda.current_stream(device).cuda_stream}

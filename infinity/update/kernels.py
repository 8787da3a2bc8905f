"""One optimizer step on one run of elements: native kernels in host memory and on CUDA, with the same bits.

Falls back to torch's fused Adam and AdamW on CUDA without native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.optim import cuda_adam
from infinity.optim.cpu_adam import (
    DTYPES,
    join_master_torch,
    receive as receive_flat,
    split_master_torch,
    sum_of_squares,
    update_flat,
)
from infinity.optim.moments import rounding_key
from infinity.plan.formats import moments_in
from infinity.plan.layout import Part
from infinity.rules import RULES, Hyper, MomentFormat, RuleName
from infinity.sizes import sum_in_order
from infinity.update.whole import update_whole


def update_run(
    states: dict[str, torch.Tensor],
    param: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper,
    step: int,
    grad_scale: float,
    first: int,
    *,
    seed: int = 0,
    threads: int = 0,
    background: bool = False,
    before: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None,
) -> None:
    """Update `param` and `states` in place. All tensors are 1-D, contiguous and on one device.

    param, grad: (n,). states: by name, those of a `StateFormat`; scales of 8-bit moments are (ceil(n / 256),).
    first: index of the first element in the model, a multiple of 256; with `seed` and `step` it determines the rounding
    of 16- and 8-bit moments. threads, background: of an update on the host (`cpu_adam.update_flat`). before: on the
    host, the parameters and states to start from, which stay; None: `param` and `states`.
    """
    # The place of the parameters decides, since states are in the same memory then.
    on_host = param.is_cpu
    if not on_host and not _has_kernels(param.device.type):
        return _update_by_torch(states, param, grad, hyper, step, grad_scale)
    kept, *moments = _arrays(states, hyper)
    given = (param, kept, grad, *moments, hyper, step)
    # A counter and no generator, so that the bits follow from element and step [Note: kernels with the same bits].
    key = rounding_key(seed, step)
    if on_host:
        sources = None if before is None else (before[0], *_arrays(before[1], hyper))
        update_flat(
            *given,
            grad_scale=grad_scale,
            key=key,
            first=first,
            threads=threads,
            background=background,
            sources=sources,
        )
    else:
        assert before is None
        cuda_adam.update_flat(*given, grad_scale=grad_scale, key=key, first=first)


def _arrays(states: dict[str, torch.Tensor], hyper: Hyper) -> tuple[torch.Tensor | None, Any, Any]:
    """Return the master or remainder, the moments and their scales."""
    return states.get("remainder", states.get("master")), *moments_in(hyper.rule, states)


def check_on_device(device_type: str, rule: RuleName, moments: MomentFormat) -> None:
    """Raise ConfigError if a device of this type cannot update states of this format in its own memory."""
    if _has_kernels(device_type) or (RULES[rule].is_adam and moments == "fp32"):
        return
    why = cuda_adam.why_not() if device_type == "cuda" else f"there are none for {device_type}"
    raise ConfigError(
        f"states of {rule} with infinity.moments {moments!r} on a device need Infinity's CUDA kernels ({why}): give "
        "offload_optimizer the device cpu or nvme, without infinity.memory.device_optimizer and ratio, or take AdamW "
        "with moments in fp32"
    )


def is_exact(device_type: str) -> bool:
    """Return whether an update in the memory of a device of this type gives the bits of an update on the host."""
    return device_type == "cpu" or _has_kernels(device_type)


def _has_kernels(device_type: str) -> bool:
    return device_type == "cuda" and cuda_adam.available()


def _update_by_torch(
    states: dict[str, torch.Tensor],
    param: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper,
    step: int,
    grad_scale: float,
) -> None:
    """Adam and AdamW with fp32 moments, without native kernels."""
    if "remainder" in states:
        master = join_master_torch(param, states["remainder"])
    elif "master" in states:
        master = states["master"]
    else:
        master = param
    _fused(master, grad, states, hyper, step, grad_scale)
    if "remainder" in states:
        new_param, new_remainder = split_master_torch(master)
        param.copy_(new_param)
        states["remainder"].copy_(new_remainder)
    elif param.dtype == torch.bfloat16:
        param.copy_(split_master_torch(master)[0])  # rounds as the native kernels do; a cast rounds ties to even
    elif "master" in states:
        param.copy_(master)


def _fused(
    master: torch.Tensor, grad: torch.Tensor, states: dict[str, torch.Tensor], hyper: Hyper, step: int, scale: float
) -> None:
    call = torch._fused_adamw_ if RULES[hyper.rule].decouples else torch._fused_adam_
    call(
        [master],
        [grad.to(torch.float32) * scale],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [],
        # Number of this step from 1: torch's optimizer also increments before the kernel.
        [torch.full((), float(step), device=master.device)],
        lr=hyper.lr,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,  # the fused kernel divides by it, and the scale may be 0
        found_inf=None,
    )


SUM_TILE = 4096
"""Elements of a tile of a sum of squares (kSumTile in csrc/adam/types.h)."""
_NORM_TILE = 1 << 22
"""Elements that torch sums at a time."""


def squared_norm(shard: torch.Tensor, parts: Sequence[Part]) -> float:
    """Return the sum of squares of a gradient shard (n,), over the `parts` in the norm; inf and NaN propagate.

    Replicated parameters are divided by their number of copies, so that each counts once in the sum over ranks.

    Each part is summed in fp64 over fixed tiles, and parts are added in order, so the result has the same bits as sums
    taken on arrival (`receive`).
    """
    squares = (_squares(shard[part.start : part.stop]) / part.copies for part in parts if part.in_norm)
    return sum_in_order(squares)


def receive(
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    add: bool,
    at: int | None = None,
    initial: float = 0.0,
    threads: int = 0,
) -> float:
    """Copy a gradient to `target`, or add it. Returns `initial` + the sum of squares of the result.

    All are in host memory. at: offset in a 1-D `target`, in elements, where `source` (of any shape) begins; None: both
    have the same shape.

    Takes one pass if `source` is contiguous. `target` may be received in pieces cut at multiples of `SUM_TILE`, each
    with the result of the one before as `initial`: the bits are those of one call.
    """
    if source.is_contiguous() and not source.is_neg() and source.dtype in DTYPES:
        return receive_flat(target, source, add=add, at=at, initial=initial, threads=threads)
    if at is not None:
        target = target[at : at + source.numel()].view(source.shape)
    if add:
        target.add_(source)
    else:
        target.copy_(source)
    return sum_of_squares(target, initial=initial, threads=threads)


def squares_into(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Write the sum of squares of each range [start, stop) of `values` (n,) to `out`, fp64 (ranges,) on its device.

    The host does not wait.
    """
    if values.is_cpu:
        out.copy_(torch.tensor([sum_of_squares(values[start:stop]) for start, stop in ranges], dtype=torch.float64))
    elif _has_kernels(values.device.type):
        cuda_adam.sums_of_squares(values, ranges, out)
    else:
        out.zero_()
        for number, (start, stop) in enumerate(ranges):
            for part in values[start:stop].split(_NORM_TILE):  # so that the fp64 copy stays small
                out[number] += part.to(torch.float64).square().sum()


def _squares(values: torch.Tensor) -> float:
    if values.is_cpu:
        return sum_of_squares(values)
    out = torch.empty(1, dtype=torch.float64, device=values.device)
    squares_into(out, values, [(0, values.numel())])
    return out.item()


@dataclass(frozen=True)
class Kernels:
    """The functions of this module that an engine calls during steps."""

    update_run: Callable[..., None]
    update_whole: Callable[..., int]
    receive: Callable[..., float]
    sum_of_squares: Callable[..., float]
    squares_into: Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[int, int]]], None]
    check_on_device: Callable[[str, RuleName, MomentFormat], None]
    is_exact: Callable[[str], bool]


NATIVE = Kernels(update_run, update_whole, receive, sum_of_squares, squares_into, check_on_device, is_exact)

"""One optimizer step on one run of elements, wherever the run lies: the native kernels in host memory and on CUDA, with
the same bits; on CUDA without them torch's fused AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.errors import ConfigError
from infinity.optim import cuda_adam
from infinity.optim.cpu_adam import Hyper, join_master_torch, split_master_torch, sum_of_squares, update_flat
from infinity.optim.cpu_adam import receive as receive_flat
from infinity.optim.flat import DTYPES
from infinity.optim.formats import moments_in
from infinity.optim.moments import MomentFormat, Rule, rounding_key
from infinity.units.layout import Part


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
) -> None:
    """Update `param` and `states` in place. All tensors are 1-D, contiguous and on one device.

    param, grad: (n,). states: by name, those of a `StateFormat`; scales of 8-bit moments are (ceil(n / 256),).
    first: number of the first element in the model, a multiple of 256; with `seed` and `step` it decides how moments
    of 16 and 8 bits are rounded.
    """
    on_host = param.is_cpu
    if not on_host and not cuda_adam.available():
        return _update_by_torch(states, param, grad, hyper, step, grad_scale)
    kept = states.get("remainder", states.get("master"))
    given = (param, kept, grad, *moments_in(hyper.rule, states), hyper, step)
    key = rounding_key(seed, step)
    if on_host:
        update_flat(*given, grad_scale=grad_scale, key=key, first=first, threads=threads)
    else:
        cuda_adam.update_flat(*given, grad_scale=grad_scale, key=key, first=first)


def check_on_device(rule: Rule, moments: MomentFormat) -> None:
    """ConfigError if a CUDA device cannot update states of this format in its own memory."""
    if cuda_adam.available() or (rule in ("adam", "adamw") and moments == "fp32"):
        return
    raise ConfigError(
        f"states of {rule} with infinity.moments {moments!r} on a CUDA device need Infinity's CUDA kernels "
        f"({cuda_adam.why_not()}): give offload_optimizer the device cpu or nvme, or take AdamW with moments in fp32"
    )


def _update_by_torch(
    states: dict[str, torch.Tensor],
    param: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper,
    step: int,
    grad_scale: float,
) -> None:
    """Adam and AdamW with moments in fp32, without kernels of our own."""
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
    call = torch._fused_adamw_ if hyper.rule == "adamw" else torch._fused_adam_
    call(
        [master],
        [grad.to(torch.float32) * scale],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [],
        # The step this update is, counted from 1: torch's optimizer counts before it calls the kernel too.
        [torch.full((), float(step), device=master.device)],
        lr=hyper.lr,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,  # by which the fused kernel divides, and the scale may be 0
        found_inf=None,
    )


_NORM_TILE = 1 << 22


def squared_norm(shard: torch.Tensor, parts: Sequence[Part], threads: int = 0) -> float:
    """The sum of squares of a gradient shard (n,), by its parameters' `parts`; NaN or inf if any element is.

    Of what several ranks have copies, each counts a part, so that it counts once in the sum over those ranks.

    Each part is summed in fp64 over fixed tiles, and the parts in order: so it does not matter whether they are summed
    here or one by one as they arrive (`receive`).
    """
    return sum((_squares(shard[part.start : part.stop], threads) / part.copies for part in parts), 0.0)


def receive(target: torch.Tensor, source: torch.Tensor, *, add: bool, at: int | None = None, threads: int = 0) -> float:
    """Copy a gradient to where it is collected, or add it to what is there; returns the sum of squares of the result.

    at: offset, in elements of a 1-D `target`, where `source` (of any shape) begins; None: both have the same shape.

    In host memory this is one pass, unless the strides forbid it.
    """
    on_host = target.is_cpu and source.is_cpu
    if on_host and source.is_contiguous() and not source.is_neg() and source.dtype in DTYPES:
        return receive_flat(target, source, add=add, at=at, threads=threads)
    if at is not None:
        target = target[at : at + source.numel()].view(source.shape)
    if add:
        target.add_(source)
    else:
        target.copy_(source)
    return _squares(target, threads)


def _squares(values: torch.Tensor, threads: int) -> float:
    if values.device.type == "cpu":
        return sum_of_squares(values, threads=threads)
    if values.device.type == "cuda" and cuda_adam.available():
        return cuda_adam.sum_of_squares(values).item()
    # Tile by tile, so that the fp64 copy stays small.
    return sum(float(part.to(torch.float64).square().sum()) for part in values.split(_NORM_TILE))

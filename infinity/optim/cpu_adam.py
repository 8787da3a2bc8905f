"""Optimizer steps on CPU tensors: checked, typed calls of the native `infinity._adam`.

All tensors are contiguous CPU tensors of equal numel and share no memory; shapes do not matter otherwise, and a slice
of a flat tensor is as good as a tensor of its own. Writes go by address, past autograd: `_version` does not change.

A bf16 parameter needs no fp32 master beside it. The master is the parameter plus a 16-bit remainder: the parameter is
the master rounded half away from zero, so that the difference of the two bit patterns always fits a signed 16-bit
integer (`split_master`, `join_master`; the same for any device: `split_master_torch`, `join_master_torch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from infinity import _adam
from infinity.errors import ConfigError
from infinity.optim.flat import DTYPES, address_of, update_arguments
from infinity.optim.moments import MOMENTS, Rule

__all__ = [
    "HYPER_KEYS",
    "Hyper",
    "join_master",
    "join_master_torch",
    "receive",
    "split_master",
    "split_master_torch",
    "sum_of_squares",
    "update_flat",
]

_CPU = torch.device("cpu")
_CANONICAL_NAN = 0x7FC00000


@dataclass(frozen=True)
class Hyper:
    """What one parameter group's update needs besides its tensors. A rule reads what it knows and no more."""

    rule: Rule = "adamw"
    """adamw decouples the decay from the gradient; adam, adagrad and sgd add it to the gradient; lion decouples it."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    """adam, adamw, lion."""
    eps: float = 1e-8
    """adam, adamw, adagrad."""
    weight_decay: float = 0.01
    momentum: float = 0.0
    """sgd, as are the next two."""
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    """adagrad."""

    def __post_init__(self) -> None:
        if self.rule not in MOMENTS:
            raise ConfigError(f"rule is {self.rule!r}: give one of {', '.join(MOMENTS)}")
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
            value = getattr(self, name)
            if not _is_number(value) or not 0.0 <= value <= _LARGEST:
                raise ConfigError(f"{name} is {value!r}: give a number from 0 to fp32's largest")
        if not _is_number(self.dampening) or not abs(self.dampening) <= _LARGEST:
            raise ConfigError(f"dampening is {self.dampening!r}: give a number in fp32's range")
        if self.lr * self.weight_decay > _LARGEST:
            raise ConfigError(f"lr * weight_decay is {self.lr * self.weight_decay}: give less of one")
        if len(self.betas) != 2 or not all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}: give two numbers in [0, 1)")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError("nesterov is True: give a momentum, and no dampening")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Hyper-parameters as keyword arguments of the native kernels."""
        return {
            "rule": self.rule,
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "lr_decay": self.lr_decay,
            "nesterov": self.nesterov,
        }


_LARGEST = torch.finfo(torch.float32).max


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


HYPER_KEYS: dict[Rule, tuple[str, ...]] = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
"""What each rule reads of a `Hyper`: the keys of its param_groups, named as in torch.optim."""


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
    threads: int = 0,
) -> None:
    """One optimizer step, in place, on all n elements of `param`; n may be 0.

    param: fp32 with no master (None); bf16 with its int16 remainder; or bf16 or fp16 with its fp32 master (then `param`
        is written only).
    grad: fp32, bf16 or fp16, whatever `param` is; multiplied by `grad_scale` as it is read.
    moments: as many as the rule has (`infinity.optim.moments.MOMENTS`), all fp32, all bf16, or all uint8 codes.
    scales: for uint8 codes one for each moment, uint8 (ceil(n / 256),); else empty.
    step: number of this optimizer step, from 1. threads: 0 is one per processor of this thread's affinity.
    key, first: what moments of 16 and 8 bits draw their rounding from, see `_adam.update`. Give each step and each
        array a key of its own, and tiles of an array their place in it.

    Raises ValueError for tensors that do not fit each other or numbers out of range, and then has changed nothing.
    """
    given = update_arguments(_CPU, param, master_or_remainder, grad, moments, scales, hyper)
    _adam.update(**given, grad_scale=grad_scale, step=step, key=key, first=first, threads=threads)


def split_master(master: Tensor, out: tuple[Tensor, Tensor] | None = None, threads: int = 0) -> tuple[Tensor, Tensor]:
    """fp32 to (bf16 parameter, int16 remainder), written into `out` if given. NaNs become 0x7FC00000 first."""
    n = master.numel()
    address = _address("master", master, n, torch.float32)
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    param, remainder = out
    _adam.split(
        address,
        _address("param", param, n, torch.bfloat16),
        _address("remainder", remainder, n, torch.int16),
        n,
        threads,
    )
    return param, remainder


def join_master(param: Tensor, remainder: Tensor, out: Tensor | None = None, threads: int = 0) -> Tensor:
    """(bf16 parameter, int16 remainder) to the fp32 they came from, written into `out` if given."""
    n = param.numel()
    addresses = _address("param", param, n, torch.bfloat16), _address("remainder", remainder, n, torch.int16)
    master = torch.empty_like(param, dtype=torch.float32) if out is None else out
    _adam.join(*addresses, _address("master", master, n, torch.float32), n, threads)
    return master


def split_master_torch(master: Tensor) -> tuple[Tensor, Tensor]:
    """`split_master` in torch's integer operations, for any device and any shape."""
    if master.dtype != torch.float32:
        raise ValueError(f"master is {master.dtype}: pass torch.float32")
    bits = torch.where(master.isnan(), _CANONICAL_NAN, master.view(torch.int32))
    high = (bits + 0x8000) >> 16  # arithmetic shift: fits int16, and its bits are those of the bf16
    remainder = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_master_torch(param: Tensor, remainder: Tensor) -> Tensor:
    """`join_master` in torch's integer operations, for any device and any shape."""
    if param.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise ValueError(f"param is {param.dtype}, remainder {remainder.dtype}: pass torch.bfloat16 and torch.int16")
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def sum_of_squares(tensor: Tensor, scale: float = 1.0, initial: float = 0.0, threads: int = 0) -> float:
    """initial + the sum of (scale * x)^2 in fp64 over an fp32, bf16 or fp16 tensor; inf and NaN propagate.

    The bits depend on values, numel, scale and initial only. A flat tensor cut at multiples of 4096 elements, each
    part's result passed on as `initial`, gives the bits of the whole; the norm of a model is the units' results
    added in unit order.
    """
    n = tensor.numel()
    address = _address("tensor", tensor, n, *DTYPES)
    return _adam.sum_of_squares(address, n, DTYPES[tensor.dtype], scale=scale, initial=initial, threads=threads)


def receive(target: Tensor, source: Tensor, *, add: bool = False, at: int | None = None, threads: int = 0) -> float:
    """target = source, or target += source; returns `sum_of_squares(target)`, in one pass over memory.

    Both are fp32, bf16 or fp16, of any shape. at: offset, in elements of `target`, where `source` begins; None: both
    have equally many elements. Sums are taken in fp32 and rounded to the target's dtype to nearest, ties to even, as in
    torch. Raises ValueError if `source` does not fit.
    """
    whole = target.numel()
    n = whole if at is None else source.numel()
    if at is not None and not 0 <= at <= whole - n:
        raise ValueError(f"source has {n:,} elements, which do not fit into {whole:,} from {at:,} on: pass a part")
    address = _address("target", target, whole, *DTYPES)
    return _adam.receive(
        _address("source", source, n, *DTYPES),
        address + (at or 0) * target.itemsize,
        n,
        source_dtype=DTYPES[source.dtype],
        target_dtype=DTYPES[target.dtype],
        add=add,
        threads=threads,
    )


def _address(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype) -> int:
    return address_of(name, tensor, numel, *dtypes, device=_CPU)

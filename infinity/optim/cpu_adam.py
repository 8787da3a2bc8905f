"""Optimizer steps on CPU tensors: checked, typed calls of the native `infinity._adam`.

All tensors are contiguous CPU tensors of equal numel and share no memory. Shapes do not matter otherwise, and slices of
a flat tensor are allowed. Kernels write by address, without autograd: `_version` does not change.

A bf16 parameter needs no fp32 master. The master is the parameter plus a 16-bit remainder: the parameter is the master
rounded half away from zero, so the difference of the two bit patterns always fits a signed 16-bit integer
(`split_master`, `join_master`; for any device: `split_master_torch`, `join_master_torch`).
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
    """Hyper-parameters of one parameter group. A rule reads only the fields in `HYPER_KEYS`.

    Raises ConfigError for values out of range.
    """

    rule: Rule = "adamw"
    """adamw and lion decouple the weight decay from the gradient; adam, adagrad and sgd add it to the gradient."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    """Read by adam, adamw and lion."""
    eps: float = 1e-8
    """Read by adam, adamw and adagrad."""
    weight_decay: float = 0.01
    momentum: float = 0.0
    """Read by sgd, like dampening and nesterov."""
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    """Read by adagrad."""

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
"""Rule → the fields of `Hyper` that it reads, which are the keys of its param_groups, named as in torch.optim."""


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
    """Execute one optimizer step in place on all n elements of `param`; n may be 0.

    param: fp32 with no master (None); bf16 with its int16 remainder; or bf16 or fp16 with its fp32 master (then `param`
        is only written).
    grad: fp32, bf16 or fp16, independent of `param`; multiplied by `grad_scale` as it is read.
    moments: one tensor per moment of the rule (`infinity.optim.moments.MOMENTS`), all fp32, all bf16, or all uint8
        codes.
    scales: for uint8 codes, one per moment, uint8 (ceil(n / 256),); else empty.
    step: number of this optimizer step, from 1. threads: 0 is one per processor of this thread's affinity.
    key, first: seed and element offset of the stochastic rounding of 16- and 8-bit moments, see `_adam.update`. Use a
        separate key for each step and array. Tiles of one array share the key and pass their offset in it.

    Raises ValueError, before any change, for tensors that do not match or numbers out of range.
    """
    given = update_arguments(_CPU, param, master_or_remainder, grad, moments, scales, hyper)
    _adam.update(**given, grad_scale=grad_scale, step=step, key=key, first=first, threads=threads)


def split_master(master: Tensor, out: tuple[Tensor, Tensor] | None = None, threads: int = 0) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16 parameter, int16 remainder), written into `out` if given. NaNs become 0x7FC00000 first."""
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
    """Join (bf16 parameter, int16 remainder) to the original fp32, written into `out` if given."""
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
    """Return initial + the sum of (scale * x)^2 in fp64 over an fp32, bf16 or fp16 tensor; inf and NaN propagate.

    The bits depend only on values, numel, scale and initial. A flat tensor cut at multiples of 4096 elements, with each
    part's result passed as `initial` of the next, gives the bits of the whole tensor. The norm of a model adds the
    units' results in unit order.
    """
    n = tensor.numel()
    address = _address("tensor", tensor, n, *DTYPES)
    return _adam.sum_of_squares(address, n, DTYPES[tensor.dtype], scale=scale, initial=initial, threads=threads)


def receive(target: Tensor, source: Tensor, *, add: bool = False, at: int | None = None, threads: int = 0) -> float:
    """Copy `source` to `target`, or add it, and return `sum_of_squares(target)`, in one pass over memory.

    Both are fp32, bf16 or fp16, of any shape. at: offset in `target`, in elements, where `source` begins; None: both
    have the same numel. Sums are computed in fp32 and rounded to the target's dtype to nearest, ties to even, as in
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

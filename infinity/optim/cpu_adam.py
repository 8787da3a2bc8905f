"""Optimizer steps on CPU tensors: checked, typed calls of the native `infinity.native._adam`.

All tensors are contiguous CPU tensors of equal numel and share no memory. Shapes do not matter otherwise, and slices of
a flat tensor are allowed. Kernels write by address, without autograd: `_version` does not change.

A bf16 parameter needs no fp32 master. The master is the parameter plus a 16-bit remainder: the parameter is the master
rounded half away from zero, so the difference of the two bit patterns always fits a signed 16-bit integer
(`split_master`, `join_master`; for any device: `split_master_torch`, `join_master_torch`).

`update_arguments` and `address_of` validate tensors for the kernels on CPU and CUDA: flat arrays on one device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinity.native import _adam
from infinity.plan.formats import BLOCK, FORMATS
from infinity.rules import RULES, Hyper, MomentFormat, RuleName

if TYPE_CHECKING:
    from infinity.native._adam import DType, Format

DTYPES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CPU = torch.device("cpu")
_FORMAT_OF: dict[torch.dtype, MomentFormat] = {dtype: kind for kind, dtype in FORMATS.items()}
_MASTERS = (torch.int16, torch.float32)
_MOMENTS, _SCALES = (tuple(f"{kind}[{k}]" for k in range(3)) for kind in ("moments", "scales"))
_ARRAYS = ("param", "master", "grad", "moments", "scales", "n", "format", "grad_dtype", "moment_format")
"""Arguments of the kernels that describe the arrays of an update."""


def address_of(
    name: str, tensor: Tensor, numel: int, dtypes: Collection[torch.dtype] = DTYPES, device: torch.device = CPU
) -> int:
    """Return the address of a tensor that native code can use as a flat array of `numel` elements.

    Raises ValueError for another device, dtype, layout or numel.
    """
    # `is_cpu` first: it takes a tenth of the time of `tensor.device`.
    if not (tensor.is_cpu if device is CPU else _is_on(tensor, device)):
        wanted = "a CPU tensor" if device.type == "cpu" else f"tensors on one CUDA device, here {device}"
        raise ValueError(f"{name} is on {tensor.device}: pass {wanted}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: pass {' or '.join(map(str, dtypes))}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg():
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
    arrays = array_arguments(device, param, master_or_remainder, grad, moments, scales, hyper.rule)
    return {**hyper.arguments, **dict(zip(_ARRAYS, arrays, strict=True))}


def array_arguments(
    device: torch.device,
    param: Tensor,
    master_or_remainder: Tensor | None,
    grad: Tensor,
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    rule: RuleName,
) -> tuple[int, int, int, list[int], list[int], int, Format, DType, MomentFormat]:
    """Return the values of `_ARRAYS`. Raises ValueError if tensors mismatch."""
    n = param.numel()
    kind = _moment_format(rule, moments, scales)
    master = 0
    if master_or_remainder is not None:
        master = address_of("master_or_remainder", master_or_remainder, n, _MASTERS, device)
    blocks, dtypes = -(-n // BLOCK), (FORMATS[kind],)
    of_moments = [address_of(_MOMENTS[i], moment, n, dtypes, device) for i, moment in enumerate(moments)]
    of_scales = [address_of(_SCALES[i], scale, blocks, (torch.uint8,), device) for i, scale in enumerate(scales)]
    addresses = address_of("param", param, n, DTYPES, device), master, address_of("grad", grad, n, DTYPES, device)
    formats = _format(param, master_or_remainder), DTYPES[grad.dtype], kind
    return *addresses, of_moments, of_scales, n, *formats


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


Arrays = tuple[Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor]]
"""param, master or remainder, moments, and scales of 8-bit moments."""

_CANONICAL_NAN = 0x7FC00000


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
    background: bool = False,
    sources: Arrays | None = None,
) -> None:
    """Execute one optimizer step in place on all n elements of `param`; n may be 0.

    param: fp32 with no master (None); bf16 with its int16 remainder; or bf16 or fp16 with its fp32 master (then `param`
        is only written).
    grad: fp32, bf16 or fp16, independent of `param`; multiplied by `grad_scale` as it is read.
    moments: one tensor per moment of the rule (`infinity.rules.RULES`), all fp32, all bf16, or all uint8
        codes.
    scales: for uint8 codes, one per moment, uint8 (ceil(n / 256),); else empty.
    step: number of this optimizer step, from 1. threads: 0 is one per processor of this thread's affinity. background:
        on threads of a lower priority, which leave the processors to other threads first.
    sources: param, master, moments and scales of the values to start from, which stay, with the shapes and dtypes of
        those that the step writes; None: it changes its values in place.
    key, first: seed and element offset of the stochastic rounding of 16- and 8-bit moments, see `_adam.update`. Use a
        separate key for each step and array. Tiles of one array share the key and pass their offset in it.

    Raises ValueError, before any change, for tensors that do not match or numbers out of range.
    """
    given = update_arguments(CPU, param, master_or_remainder, grad, moments, scales, hyper)
    if sources is not None:
        before = update_arguments(CPU, sources[0], sources[1], grad, *sources[2:], hyper)
        if any(given[name] != before[name] for name in ("n", "format", "moment_format")):
            raise ValueError("sources differ from param, master and moments: pass tensors of their shapes and dtypes")
        given["sources"] = [before["param"], before["master"], *before["moments"], *before["scales"]]
    _adam.update(
        **given, grad_scale=grad_scale, step=step, key=key, first=first, threads=threads, background=background
    )


def split_master(master: Tensor, out: tuple[Tensor, Tensor] | None = None, threads: int = 0) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16 parameter, int16 remainder), written into `out` if given. NaNs become 0x7FC00000 first."""
    n = master.numel()
    address = address_of("master", master, n, (torch.float32,))
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    param, remainder = out
    _adam.split(
        address,
        address_of("param", param, n, (torch.bfloat16,)),
        address_of("remainder", remainder, n, (torch.int16,)),
        n,
        threads,
    )
    return param, remainder


def join_master(param: Tensor, remainder: Tensor, out: Tensor | None = None, threads: int = 0) -> Tensor:
    """Join (bf16 parameter, int16 remainder) to the original fp32, written into `out` if given."""
    n = param.numel()
    addresses = address_of("param", param, n, (torch.bfloat16,)), address_of("remainder", remainder, n, (torch.int16,))
    master = torch.empty_like(param, dtype=torch.float32) if out is None else out
    _adam.join(*addresses, address_of("master", master, n, (torch.float32,)), n, threads)
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
    address = address_of("tensor", tensor, n)
    return _adam.sum_of_squares(address, n, DTYPES[tensor.dtype], scale=scale, initial=initial, threads=threads)


def receive(
    target: Tensor,
    source: Tensor,
    *,
    add: bool = False,
    at: int | None = None,
    initial: float = 0.0,
    threads: int = 0,
) -> float:
    """Copy `source` to `target`, or add it, and return `sum_of_squares(target)` from `initial` on, in one pass over
    memory.

    Both are fp32, bf16 or fp16, of any shape. at: offset in `target`, in elements, where `source` begins; None: both
    have the same numel. Sums are computed in fp32 and rounded to the target's dtype to nearest, ties to even, as in
    torch. Raises ValueError if `source` does not fit.
    """
    whole = target.numel()
    n = whole if at is None else source.numel()
    if at is not None and not 0 <= at <= whole - n:
        raise ValueError(f"source has {n:,} elements, which do not fit into {whole:,} from {at:,} on: pass a part")
    address = address_of("target", target, whole)
    return _adam.receive(
        address_of("source", source, n),
        address + (at or 0) * target.itemsize,
        n,
        source_dtype=DTYPES[source.dtype],
        target_dtype=DTYPES[target.dtype],
        add=add,
        initial=initial,
        threads=threads,
    )

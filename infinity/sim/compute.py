"""The time of a model's operations on the meta device, and the memory of their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from infinity.optim.live_bytes import LiveBytes
from infinity.sim.clock import Clock
from infinity.sim.device import META, SimulatedDevice
from infinity.sim.machine import Links
from infinity.units.compiled import eager

aten = torch.ops.aten

_FREE = {
    aten._unsafe_view.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operations that access no memory, beside those whose result is a view."""

_SPARSE = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
}
"""Operations that read as many bytes as they write, of a larger tensor."""

_attention = aten._scaled_dot_product_flash_attention_for_cpu
_attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


class Compute(TorchDispatchMode):
    """Charges each operation to the calling thread, and counts the bytes of results that are alive.

    An operation takes its seconds in the device's `times`. One that is not known there takes its bytes ÷ bandwidth, and
    a matrix product its operations ÷ FLOP/s, its largest operand ÷ the rate of weights, or its bytes, the longest of
    the three.
    """

    def __init__(self, clock: Clock, device: SimulatedDevice, links: Links) -> None:
        """links: `flops` and `weights` are those of the device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._device = device
        self._kinds: dict[int, _Kind] = {}
        """id of an operation → its kind. torch hashes operations in Python."""
        self._seen: list[Any] = []
        """The operations in `_kinds`, which stay alive."""
        self._known: dict[Any, _Operation] = {}
        """Operation and its arguments, with tensors as shapes, strides and dtypes → its result and cost. Meta kernels
        take longer than a look-up.
        """
        self._rates = {getattr(torch, name): rate for name, rate in links.flops.items()}
        self._weights = {getattr(torch, name): rate for name, rate in links.weights.items()}
        self.flops = 0.0
        self.bytes = LiveBytes()
        """Bytes of the results of the model's operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's own way to keep Dynamo out takes longer than most operations."""
        return False

    @eager
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = self._kinds.get(id(func)) or self._kind_of(func)
        if kind is _Kind.VIEW:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._device.compute_reached().wait()
            return 1.0 if args[0].is_floating_point() else 1
        key = None if kind is _Kind.OTHER else (id(func), _key(args), _key(kwargs))
        known = self._known.get(key)
        if known is None:
            result = func(*args, **kwargs)
            known = self._cost(None if key is None else (func, *key[1:]), func, args, kwargs, result)
            if key is not None and _is_meta(result):
                self._known[key] = known
        else:
            result = args[0] if kind is _Kind.SAME else _from_specs(known.made)
        self.flops += known.flops
        if known.draws:
            torch.rand((), device="cpu")  # moves a generator, as the operation would
        if known.seconds or known.nbytes:
            self._device.operate(known.seconds, known.nbytes)
        if kind is not _Kind.SAME and self._clock.current.index == 0:
            for made in result if isinstance(result, (tuple, list)) else (result,):
                self.count(made)
        return result

    def _kind_of(self, func: Any) -> _Kind:
        self._seen.append(func)
        kind = self._kinds[id(func)] = _kind(func)
        return kind

    def _cost(self, key: Hashable, func: Any, args: Any, kwargs: Any, result: Any) -> _Operation:
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        read = len(tensors)
        _collect(result, tensors)
        nbytes = 2 * sum(map(_nbytes, tensors[read:])) if func in _SPARSE else sum(map(_nbytes, tensors))
        flops, seconds = self._arithmetic(func, args, kwargs, result, tensors)
        if func in _FREE:
            nbytes = 0
        elif self._device.times is not None and key is not None:
            known = self._device.times.seconds(key, func, args, kwargs, result, seconds)
            seconds, nbytes = (seconds, nbytes) if known is None else (known, 0)
        return _Operation(_specs(result), seconds, flops, nbytes, _draws(func, args))

    def _arithmetic(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: Any) -> tuple[float, float]:
        """Return the operations and seconds of a matrix product or attention; 0 for others."""
        packet = func.overloadpacket
        if packet is _attention or packet is _attention_backward:
            query, key, value = (args if packet is _attention else args[1:])[:3]
            products = 2 if packet is _attention else 5
            flops = products * query.numel() // query.shape[-1] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            # Blocks above the diagonal are skipped.
            causal = args[4] if packet is _attention and len(args) > 4 else kwargs.get("is_causal", False)
            if packet is _attention_backward:
                causal = args[7] if len(args) > 7 else causal
            flops *= 0.5 if causal else 1.0
        else:
            count: Callable[..., int] | None = flop_registry.get(packet)
            if count is None:
                return 0.0, 0.0
            flops = count(*args, **kwargs, out_val=result)
        dtype = next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        rate = self._rates.get(dtype) or self._rates.get(torch.float32)
        seconds = 0.0 if rate is None else flops / rate
        if weights := self._weights.get(dtype):
            seconds = max(seconds, max(map(_nbytes, tensors)) / weights)
        return flops, seconds

    def count(self, tensor: Any) -> None:
        """Count the memory of a result until it is freed."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return
        self.bytes.count(tensor.untyped_storage())


@dataclass(frozen=True)
class _Operation:
    """Result and cost of an operation."""

    made: Any
    """Shape, stride and dtype of the result, or a tuple of them."""
    seconds: float
    flops: float
    nbytes: int
    """Bytes whose access takes time in addition to `seconds`, at once with them."""
    draws: bool
    """True if it draws random numbers."""


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Kind(Enum):
    """Results of operations."""

    VIEW = "a view, or no memory at all"
    NEW = "new memory, whose shape depends on the shapes of the arguments only"
    SAME = "its first argument, which it changes"
    OTHER = "anything else"


@cache
def _kind(func: Any) -> _Kind:
    if func.is_view or func.namespace == "profiler":
        return _Kind.VIEW
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return _Kind.OTHER
    aliased = [value.alias_info is not None for value in arguments]
    if not any(aliased) and not any(value.alias_info is not None for value in returns):
        return _Kind.NEW
    in_place = aliased[0] and not any(aliased[1:]) and len(returns) == 1 and func._schema.name.endswith("_")
    return _Kind.SAME if in_place else _Kind.OTHER


def _key(value: Any) -> Any:
    """Return a hashable description of an argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([_key(each) for each in value])
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return type(value), value


def _is_meta(result: Any) -> bool:
    """Return whether a result has no values that a repetition would have to compute."""
    each = result if isinstance(result, (list, tuple)) else (result,)
    return all(isinstance(made, torch.Tensor) and made.is_meta for made in each)


def _specs(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _Spec(tuple(result.shape), result.stride(), result.dtype)
    if isinstance(result, (list, tuple)):
        return tuple(_specs(each) for each in result)
    return result


def _from_specs(made: Any) -> Any:
    if isinstance(made, _Spec):
        return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
    if isinstance(made, tuple):
        return tuple(_from_specs(each) for each in made)
    return made


def _draws(func: Any, args: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return func.overloadpacket is not _attention or (len(args) > 3 and args[3] > 0)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, those of an expanded one once."""
    if 0 in tensor.stride():
        return prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.itemsize
    return tensor.numel() * tensor.itemsize


class AsOnHost(TorchFunctionMode):
    """Makes `is_cpu` true for all tensors, so that the model and its losses take the same branches as on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return True if func == _IS_CPU else func(*args, **(kwargs or {}))


_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


@contextmanager
def fused_attention() -> Iterator[None]:
    """Run attention on the meta device as a fused kernel, as real devices do.

    torch would run the plain operations, which keep the matrix of scores.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _fused, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    if query.dim() != 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        plain: torch.Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return plain
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    fused: torch.Tensor = _attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return fused

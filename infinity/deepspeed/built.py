"""Parameters built under `zero.Init` on several ranks: rank 0 holds their values until `initialize`.

Each rank runs the model's constructor. At the end of the block the other ranks drop their values
(`infinity.model.remote`), since `initialize` broadcasts rank 0's. Until then, `zero.GatheredParameters` broadcasts them
for the duration of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from infinity.deepspeed.accelerator import get_accelerator
from infinity.errors import UsageError
from infinity.model.remote import drop_values, restore
from infinity.units.released import is_released
from infinity.units.residents import owner_of

_DIGEST = 16
"""Bytes of the digest by which ranks without values compare parameters."""


@dataclass
class _Built:
    """A parameter that was registered in a block of `zero.Init`."""

    order: int
    """Position in the order of registration, which is the same on all ranks."""
    label: str
    gathered: int = 0
    """Number of open blocks that gather the parameter."""


_built = WeakIdKeyDictionary()
"""Parameter → `_Built`."""
_numbers = count()
_pending: list[nn.Parameter] = []
"""Parameters of the open blocks of `zero.Init`, whose values every rank still has."""
_open_blocks = 0


@contextmanager
def building() -> Iterator[None]:
    """Register the parameters that modules get in the block. At its end, drop the values of ranks other than 0.

    Nested blocks drop values at the end of the outermost one. No-op on a single rank.
    """
    global _open_blocks
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    hook: Any = register_module_parameter_registration_hook(_register)
    _open_blocks += 1
    try:
        yield
    finally:
        hook.remove()
        _open_blocks -= 1
        if not _open_blocks:
            pending = [*_pending]
            _pending.clear()
            for parameter in pending:
                if not (_has_engine(parameter) or _built[parameter].gathered):
                    _drop(parameter, None)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Leave `parameters` as they are at the end of blocks, since an engine has taken them."""
    taken = set(map(id, parameters))
    _pending[:] = [parameter for parameter in _pending if id(parameter) not in taken]
    for parameter in [parameter for parameter in _built if id(parameter) in taken]:
        del _built[parameter]


@contextmanager
def gathered(parameters: Iterable[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Broadcast rank 0's values of `parameters` for the block; at its end, send those of `modifier_rank` to rank 0.

    modifier_rank: None: all ranks make the same edits, or none. Collective if a parameter was built in a block of
    `building` and has no engine yet. Other parameters are ignored.
    """
    found = {id(p): p for p in parameters if p in _built and not _has_engine(p)}
    ours = sorted(found.values(), key=lambda p: _built[p].order)
    if not ours:
        yield
        return
    if modifier_rank is not None and not 0 <= modifier_rank < dist.get_world_size():
        raise UsageError(f"modifier_rank is {modifier_rank}: pass a rank from 0 to {dist.get_world_size() - 1}")
    outermost = [p for p in ours if not _built[p].gathered]
    digests: Sequence[bytes | None] = [None] * len(outermost)
    for parameter in ours:
        _built[parameter].gathered += 1
    try:
        for parameter in outermost:
            restore(parameter)
            _broadcast(parameter.data, 0)
        yield
        if modifier_rank is not None and (modifier_rank or _open_blocks):
            for parameter in ours:
                _broadcast(parameter.data, modifier_rank)
        if not _open_blocks:
            digests = _digests(outermost)
    finally:
        for parameter in ours:
            _built[parameter].gathered -= 1
        if not _open_blocks:
            for parameter, digest in zip(outermost, digests, strict=True):
                _drop(parameter, digest)


def _register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is None or parameter in _built or is_lazy(parameter) or _has_engine(parameter) or parameter.is_meta:
        return
    if type(parameter.data) is torch.Tensor and parameter.layout is torch.strided:
        label = f"parameter {name} of a {type(module).__name__}, of shape {list(parameter.shape)},"
        _built[parameter] = _Built(next(_numbers), label)
        _pending.append(parameter)


def _has_engine(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of an engine, or of one that was closed without its values."""
    return is_released(parameter) or owner_of(parameter) is not None


def _drop(parameter: nn.Parameter, digest: bytes | None) -> None:
    if dist.get_rank():
        drop_values(parameter, _built[parameter].label, digest)


def _digests(parameters: Sequence[nn.Parameter]) -> list[bytes]:
    """Return a digest of each parameter's values on rank 0."""
    if dist.get_rank():
        digests = torch.empty(len(parameters), _DIGEST, dtype=torch.uint8)
    else:
        values = (_bytes(p.data).cpu().numpy().data for p in parameters)
        digests = torch.tensor([list(blake2b(v, digest_size=_DIGEST).digest()) for v in values], dtype=torch.uint8)
    _broadcast(digests, 0)
    return [bytes(row) for row in digests.tolist()]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `value`, uint8 (n,): a view if it is contiguous."""
    return value.contiguous().view(-1).view(torch.uint8)


def _broadcast(value: torch.Tensor, source: int) -> None:
    """Broadcast `value` in place."""
    if not value.numel():
        return
    device = get_accelerator().current_device_name() if dist.get_backend() == "nccl" else value.device
    there = _bytes(value).to(device)
    dist.broadcast(there, source)
    if dist.get_rank() != source and there.data_ptr() != value.data_ptr():
        value.copy_(there.view(value.dtype).view(value.shape))

"""Bytes of tensors that are alive, counted as operations return them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """live: bytes of the counted storages that are alive. peak: the most so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, once."""
        if not hasattr(storage, "_counted"):
            storage._counted = _Counted(self, storage.nbytes())  # type: ignore[attr-defined]


class _Counted:
    """Memory that is alive. Belongs to its storage, and ends with it."""

    __slots__ = ("_live", "_nbytes")

    def __init__(self, live: LiveBytes, nbytes: int) -> None:
        self._live, self._nbytes = live, nbytes
        live.live += nbytes
        live.peak = max(live.peak, live.live)

    def __del__(self) -> None:
        self._live.live -= self._nbytes


class Allocations(TorchDispatchMode):
    """Counts the memory that operations allocate in its context, on any device, the meta device included.

    Memory inside of one operation, such as that of a matrix product, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = LiveBytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in given:
                self.bytes.count(storage)
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of dense tensors in nested containers."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]

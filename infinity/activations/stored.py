"""Storages that autograd saved, and the tensors in them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from infinity.errors import LifetimeError
from infinity.plan.placement import Extent
from infinity.tiers.memory import storage_users
from infinity.tiers.transfer import Transfer


class Alias(NamedTuple):
    """A saved tensor whose storage is in memory. `tensor` shares its version counter; version: when it was saved."""

    tensor: torch.Tensor
    version: int

    def check(self) -> torch.Tensor:
        """Return the tensor. Raises LifetimeError if it was edited in place since."""
        if self.tensor._version != self.version:
            raise edited(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


class Leftover(NamedTuple):
    """Memory and room of a storage that no graph needs any more. `transfer` may still use them."""

    transfer: Transfer | None
    memory: torch.Tensor | None
    extent: Extent | None


class Stored:
    """A storage that saved tensors share. Lives as long as one of them, so its memory is freed with the graph.

    | memory | extent | transfer | the bytes are                                           |
    | yes    | no     | no       | in memory only                                          |
    | yes    | yes    | yes      | on their way: `leaves` tells the direction              |
    | yes    | yes    | no       | in both places                                          |
    | no     | yes    | no       | in the room only                                        |
    """

    __slots__ = (
        "__weakref__", "aliases", "edits", "extent", "key", "leaves", "leftovers", "memory", "nbytes", "number",
        "spoiled", "transfer", "version",
    )  # fmt: skip

    def __init__(self, number: int, tensor: torch.Tensor, leftovers: deque[Leftover]) -> None:
        """number: position in the order of first saves. leftovers: receives memory and room at the end of this."""
        storage = tensor.untyped_storage()
        self.number = number
        self.nbytes = storage.nbytes()
        self.aliases: dict[int, Alias] = {}
        """Saved tensors in this storage as it was saved, while it is in memory, by a number of their own."""
        self.edits: dict[int, LifetimeError] = {}
        """Number of a saved tensor that was edited in place before the memory was dropped → error of its use."""
        self.spoiled: LifetimeError | None = None
        """Error of any use: bytes that had come back were edited in place, and left again."""
        self.extent: Extent | None = None
        self.transfer: Transfer | None = None
        self.leaves = False
        self.leftovers = leftovers
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.hold(whole.set_(storage, 0, (self.nbytes,), (1,)))

    def hold(self, memory: torch.Tensor) -> None:
        """Take `memory`, uint8 (nbytes,), the whole storage."""
        self.memory: torch.Tensor | None = memory
        self.key = key_of(memory)
        self.version = memory._version

    def is_shared(self) -> bool:
        """Return whether anything but saved tensors of this refers to the memory: nothing else can edit it then."""
        assert self.memory is not None
        return storage_users(self.memory) > _ALONE + len(self.aliases)

    def drop(self) -> None:
        """Free the memory, whose bytes are in the room. Records edits in place, which only `aliases` can show."""
        assert self.memory is not None
        for number, alias in list(self.aliases.items()):  # a garbage collection may remove some
            if alias.tensor._version != alias.version:
                self.edits[number] = edited(alias.tensor.shape, alias.tensor._version, alias.version)
        if self.memory._version != self.version:
            self.spoiled = edited((self.nbytes,), self.memory._version, self.version)
        self.aliases.clear()
        self.memory = None

    def check(self) -> None:
        """Raise LifetimeError if bytes that came back from the room were edited in place since."""
        assert self.memory is not None
        if self.spoiled is not None:
            raise self.spoiled
        if self.memory._version != self.version:
            raise edited((self.nbytes,), self.memory._version, self.version)

    def __del__(self) -> None:
        busy = self.transfer is not None and not self.transfer.done()
        if self.extent is not None:
            self.leftovers.append(Leftover(*((self.transfer, self.memory) if busy else (None, None)), self.extent))


def key_of(tensor: torch.Tensor) -> int:
    """Return a number of the tensor's storage, unique among those alive."""
    return int(tensor.untyped_storage()._cdata)


def edited(shape: torch.Size | tuple[int, ...], present: int, saved: int) -> LifetimeError:
    """Return the error of a saved tensor that was edited in place: torch's, with both versions."""
    return LifetimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor of shape {list(shape)} is at version {present}, but version {saved} was saved. Do the edit out of "
        "place, or after backward."
    )


_ALONE = storage_users(torch.empty(1))
"""`storage_users` of a storage with one tensor."""

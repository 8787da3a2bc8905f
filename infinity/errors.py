"""Every error that Infinity raises on purpose.

All derive from `InfinityError`, so a caller can tell "Infinity refused" from a bug, and most also derive from the
built-in class a Python programmer would expect (`ValueError` for bad input, `MemoryError` for too little memory).
Failed transfers are plain `OSError`s with errno, path, offset and size: they carry nothing that `OSError` lacks. One
that failed its checksum is a `ChecksumError`, which is an `OSError` too.

A message says what is wrong and what to do about it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import ClassVar


def user_level() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called by the caller, shows the user's line: the first one
    outside of this package and torch.
    """
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("infinity", "torch")]
    libraries = (contextlib.__file__, *(os.path.dirname(file) + os.sep for file in files if file))
    level, frame = 1, sys._getframe(1)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(libraries):
        level, outer = level + 1, outer.f_back
    return 1 if outer is None else level


class InfinityError(RuntimeError):
    """Base of every error raised on purpose."""


class ConfigError(InfinityError, ValueError):
    """The configuration cannot be used.

    `problems` holds one line per problem; the message is the lines together.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)  # the joined message is not what __init__ takes


class ModelError(InfinityError, ValueError):
    """The model cannot be trained as it is: no trainable parameter, a parameter type that no optimizer here handles."""


class NotEnoughError(InfinityError):
    """A tier lacks bytes for what is to be put there; raised before anything is written, mostly at start.

    `needed` and `available` are bytes, `where` is a folder or the name of a tier, `hint` says what would make it fit.
    """

    lacking: ClassVar[str] = "room in {}"
    """Text of the error that names what is too little, with `where`."""

    def __init__(self, where: str, needed: int, available: int, hint: str = "") -> None:
        self.where, self.needed, self.available, self.hint = where, needed, available, hint
        if needed > available:
            text = (
                f"too little {self.lacking.format(where)}: {needed:,} bytes are needed, {available:,} are available, "
                f"{needed - available:,} are missing"
            )
        else:
            lacking = self.lacking.format(where)
            text = f"the system refused {needed:,} bytes of {lacking}, of which {available:,} are available"
        super().__init__(f"{text}; {hint}" if hint else text)

    def __reduce__(self) -> tuple[type[NotEnoughError], tuple[str, int, int, str]]:
        return type(self), (self.where, self.needed, self.available, self.hint)


class OutOfSpaceError(NotEnoughError):
    """Too little space on a file system."""

    lacking = "space in {}"


class OutOfMemoryError(NotEnoughError, MemoryError):
    """Too little memory on the host or the device."""

    lacking = "{}"


class StorageError(InfinityError):
    """A folder for tier files or checkpoints does not exist, is no folder, or cannot be written; or the kernel gives no
    queues to read and write them with.
    """


class ChecksumError(OSError, StorageError):
    """Two reads of a block returned other bytes than were written (`aio.checksum`); none of them was used.

    The text says whether both returned the same bytes.

    `errno` is EBADMSG, `filename` the file's path.
    """

    def __init__(self, errno: int, text: str, path: str) -> None:
        super().__init__(errno, text, path)

    def __str__(self) -> str:
        return str(self.strerror)  # says where it was, the path included


class LifetimeError(InfinityError):
    """A buffer was used after, or changed before, the moment its lease allows.

    Raised when a saved tensor was edited in place between forward and backward, and when a lease is given back twice.
    """


class ResidencyError(InfinityError):
    """A unit was asked to make a transition that the residency table does not hold."""


class NonFiniteError(InfinityError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite; no state has been changed by the step that raised it."""


class CheckpointError(InfinityError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""


class RanksError(InfinityError):
    """Ranks were started with different models or configs, or are about to do different things where all have to do the
    same; raised on all of them, before they do. Or another rank failed, or ended.
    """


class UpdateError(InfinityError):
    """An optimizer class failed in the update of a parameter. Other parameters of the step may be updated."""


class UsageError(InfinityError):
    """Calls in an order that has no meaning: `step()` without `backward()`, any call of the engine after `close()`."""

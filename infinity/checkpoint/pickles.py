"""Reads tensors, numbers, texts and containers of them from files of `torch.save`, and nothing else.

`torch.load(weights_only=True)` allocates sizes that the file states: a record may be compressed a thousand times, and
a `bytearray` or a `FloatTensor` may have any length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import _get_user_allowed_globals

from infinity.checkpoint.archive import OF_TORCH, File, first_unknown, read_archive, unpickle
from infinity.checkpoint.format import reason
from infinity.errors import CheckpointError
from infinity.inputs import open_input

_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {name for name in vars(torch) if name.endswith("Storage") and name not in ("TypedStorage",)}
_KNOWN = OF_TORCH | {
    "_codecs encode",
    "builtins complex",
    "__builtin__ complex",
    "builtins bytearray",
    "__builtin__ bytearray",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_sparse_tensor",
    "torch.serialization _get_layout",
    "torch.storage UntypedStorage",
    *(f"torch {name}" for name in _DTYPES | _STORAGES),
}


def byte_array(*arguments: Any) -> bytearray:
    """Return a bytearray of a text, in place of `bytearray`, which allocates any size given in the file."""
    if arguments and not isinstance(arguments[0], (str, bytes)):
        raise CheckpointError(f"a bytearray is constructed of a {type(arguments[0]).__name__}: the file is damaged")
    return bytearray(*arguments)


class TensorClass:
    """Stands for torch.Tensor, whose constructor allocates any size given in the file."""

    def __new__(cls, *arguments: Any) -> TensorClass:
        raise CheckpointError("a tensor is constructed of a size: the file is damaged")


def from_type(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor with its attributes, in place of torch's `_rebuild_from_type_v2`."""
    if function is not torch._utils._rebuild_tensor_v2 or kind is not TensorClass:
        raise CheckpointError(f"a tensor with attributes is constructed by {function!r}: the file is damaged")
    return torch._tensor._rebuild_from_type_v2(function, torch.Tensor, arguments, state)


_REPLACED: dict[str, Any] = {
    "builtins bytearray": byte_array,
    "__builtin__ bytearray": byte_array,
    "torch Tensor": TensorClass,
    "torch._tensor _rebuild_from_type_v2": from_type,
}


def load_values(path: Path) -> Any:
    """Return the content of a file of `torch.save`. Raises FileNotFoundError, and CheckpointError, in one line."""
    try:
        with open_input(path) as file:
            return read_values(file, path)
    except FileNotFoundError:
        raise
    except RecursionError:
        why = "its values are nested too deeply"
    except Exception as error:  # noqa: BLE001 - the unpickler raises many classes
        why = reason(error).replace(f"{path}: ", "").replace(f"{path} ", "it ")
    raise CheckpointError(f"{path} cannot be read ({why}): the checkpoint is damaged, use another one")


def read_values(file: File, path: Path) -> Any:
    """Return the content of an open file. path: for errors. Raises errors of many classes.

    Globals that the application registered with `torch.serialization.add_safe_globals` are used, too.
    """
    archive = read_archive(file, path)
    unknown = first_unknown(archive.pickled, _KNOWN)
    if unknown is not None:
        unknown = first_unknown(archive.pickled, _KNOWN | _registered())
    if unknown is not None:
        raise CheckpointError(f"Unsupported global: GLOBAL {unknown.replace(' ', '.')}")

    def storage_of(start: int, nbytes: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(nbytes)
        if nbytes:
            file.seek(start)
            view: Any = torch.tensor([], dtype=torch.uint8).set_(storage).numpy().data
            if file.readinto(view) != nbytes:
                raise CheckpointError("it ended early: it was changed while it was read")
        return storage

    return unpickle(archive, storage_of, _REPLACED)


def _registered() -> set[str]:
    """Return "module name" of the globals that the application registered, as torch's unpickler finds them: by path.

    The name of a nested class has dots, too, so that each dot of a path may end its module.
    """
    paths = [path.split(".") for path in _get_user_allowed_globals()]
    return {f"{'.'.join(path[:end])} {'.'.join(path[end:])}" for path in paths for end in range(1, len(path))}

"""Reads archives that `torch.save` wrote, without executing code of their pickles.

An archive is a zip file of records that are not compressed: one pickle, and one record for each storage of tensors. The
places of records are compared with the file, their content with its checksums, the names of classes and functions in
the pickle with a list, and the size of each storage with its record, before memory is allocated for any of them.

`load_values` reads tensors, numbers, texts and containers of them, and nothing else. `torch.load(weights_only=True)`
allocates sizes that the file states: a record may be compressed a thousand times, and a `bytearray` or a `FloatTensor`
may have any length.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import serialization
from torch._weights_only_unpickler import Unpickler, _get_user_allowed_globals
from torch.storage import TypedStorage, UntypedStorage

from infinity.checkpoint.format import reason
from infinity.errors import CheckpointError
from infinity.inputs import open_input

_CHUNK = 16 << 20
"""Bytes of a record that are read at a time."""
_LARGEST_PICKLE = 1 << 29
"""Bytes of a pickle without its tensors. 100,000 parameters need some 20 MB."""

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
OF_TORCH = frozenset(
    {
        "collections OrderedDict",
        "collections Counter",
        "torch Size",
        "torch device",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_parameter_with_state",
        "torch.nn.parameter Parameter",
        "builtins set",
        "__builtin__ set",
        "torch Tensor",
        "torch._tensor _rebuild_from_type_v2",
        *(f"torch {name}Storage" for name in _STORAGES),
        *(f"torch {name}" for name in _DTYPES),
    }
)
"""Globals that torch's unpickler constructs itself. Readers replace those that allocate a size given in the file."""

File: TypeAlias = io.BufferedReader | io.BytesIO
"""An open file, or the bytes of one."""

StorageOf = Callable[[int, int], UntypedStorage]
"""Place of a record's first byte in the file, and its bytes → a storage."""


@dataclass(frozen=True)
class Archive:
    """An archive whose records are within the file, apart from each other, and have the right checksums."""

    path: Path
    name: str
    """Top folder of its records: the name of the file that torch.save wrote, or "archive"."""
    pickled: bytes
    storages: Mapping[str, tuple[int, int]]
    """Name of a storage → the place of its first byte in the file, and its bytes."""


def read_archive(file: File, path: Path) -> Archive:
    """Check an archive and return its pickle. path: for errors. Raises CheckpointError, and what zipfile raises."""
    size = file.seek(0, os.SEEK_END)
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"{path} is not a zip archive of torch.save: it is truncated, or older than torch 1.6; use another one"
        )
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: info for info in archive.infolist()}
        if len(records) != len(archive.infolist()):
            raise CheckpointError(f"{path} holds a record twice: it is damaged, use another one")
    (pickled,) = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")] or [""]
    if not pickled:
        raise CheckpointError(f"{path} holds no data.pkl, so torch.save did not write it: use another one")
    folder = pickled.removesuffix("data.pkl")
    places = {name: _place(file, info, size, path) for name, info in records.items()}
    if sum(info.file_size for info in records.values()) > size:
        raise CheckpointError(f"{path} holds records that overlap: it is damaged, use another one")
    for name, info in records.items():
        if _checksum(file, places[name], info.file_size) != info.CRC:
            raise CheckpointError(f"{path}: the checksum of {name} is wrong: it is damaged, use another one")
    if records[pickled].file_size > _LARGEST_PICKLE:
        raise CheckpointError(
            f"{path}: its pickle has {records[pickled].file_size:,} bytes, more than {_LARGEST_PICKLE:,}: it is "
            "damaged, use another one"
        )
    if (order := folder + "byteorder") in records and _bytes(file, places[order], records[order]) != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine: save it on a little-endian one")
    data = folder + "data/"
    storages = {
        name.removeprefix(data): (places[name], info.file_size)
        for name, info in records.items()
        if name.startswith(data)
    }
    return Archive(path, folder.rstrip("/"), _bytes(file, places[pickled], records[pickled]), storages)


def _place(file: File, info: zipfile.ZipInfo, size: int, path: Path) -> int:
    """Return the position of a record's first byte. Raises CheckpointError if it is compressed or overruns the file."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) == 30 and header[:4] == b"PK\x03\x04" and info.compress_type == zipfile.ZIP_STORED:
        names = sum(struct.unpack("<HH", header[26:30]))
        start = info.header_offset + 30 + int(names)
        if start + info.file_size <= size and not info.flag_bits & 1:
            return start
    raise CheckpointError(f"{path}: its record {info.filename!r} is compressed, encrypted or cut off: use another one")


def _checksum(file: File, start: int, length: int) -> int:
    """Return the CRC-32 of a record's bytes, as torch.save writes it. (torch.load does not compare it.)"""
    file.seek(start)
    crc = 0
    while length > 0 and (chunk := file.read(min(length, _CHUNK))):
        crc = zlib.crc32(chunk, crc)
        length -= len(chunk)
    return crc


def _bytes(file: File, start: int, info: zipfile.ZipInfo) -> bytes:
    file.seek(start)
    return file.read(info.file_size)


def first_unknown(pickled: bytes, known: Collection[str]) -> str | None:
    """Return the first class or function that a pickle refers to and that is not known, as "module name"."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST") and argument not in known:
            return str(argument)
    return None


def unpickle(archive: Archive, storage_of: StorageOf, replaced: Mapping[str, Any]) -> Any:
    """Return the content of the pickle. Call `first_unknown` before.

    replaced: "module name" of a class or function → the one that is called in its place.
    """
    storages: dict[str, TypedStorage] = {}

    def persistent_load(saved: Any) -> TypedStorage:
        _, kind, name, _, numel = saved
        if name not in storages:
            dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
            nbytes = int(numel) * dtype.itemsize
            start, size = archive.storages.get(name, (0, None))
            if nbytes < 0 or size != nbytes:
                found = "none is stored" if size is None else f"{size:,} bytes are stored"
                raise CheckpointError(
                    f"{archive.path} declares a storage of {numel} elements ({nbytes:,} bytes), and {found}: use "
                    "another one"
                )
            storages[name] = TypedStorage(wrap_storage=storage_of(start, nbytes), dtype=dtype, _internal=True)
        return storages[name]

    content = _with_replaced(archive.pickled, replaced)
    unpickler: Any = Unpickler(io.BytesIO(content), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    with serialization.safe_globals(list(replaced.values())):
        return unpickler.load()


def _with_replaced(pickled: bytes, replaced: Mapping[str, Any]) -> bytes:
    parts, end = [], 0
    for opcode, argument, position in pickletools.genops(pickled):
        if position is not None and opcode.name == "GLOBAL" and argument in replaced:
            own = replaced[str(argument)]
            parts += [pickled[end:position], f"c{own.__module__}\n{own.__qualname__}\n".encode()]
            end = position + len(f"c{argument}\n")
    return b"".join([*parts, pickled[end:]])


@contextmanager
def only_safe(classes: list[Any]) -> Iterator[None]:
    """Replace torch's list of safe globals by `classes` in the block: the application may have added real classes."""
    former = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals(classes)
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(former)


_DTYPE_NAMES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGE_NAMES = {name for name in vars(torch) if name.endswith("Storage") and name != "TypedStorage"}
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
    *(f"torch {name}" for name in _DTYPE_NAMES | _STORAGE_NAMES),
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
    if unknown is not None:  # only then, since torch fails for some globals that can be registered
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

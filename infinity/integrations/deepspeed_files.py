"""Reads one file that DeepSpeed's `torch.save` wrote, without executing code of its pickle and without reading tensors.

The pickle goes through torch's weights-only unpickler. Tensors are constructed on the meta device, and every storage is
compared with the size of its record in the archive; values are read later, in parts, from their place in the file.
Names of classes are compared with a fixed list before unpickling starts. Classes of DeepSpeed on that list are replaced
by inert stand-ins, even if DeepSpeed is installed.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import serialization
from torch._weights_only_unpickler import Unpickler
from torch.storage import TypedStorage

from infinity.checkpoint.format import reason
from infinity.errors import CheckpointError

_CHUNK = 16 << 20
"""Bytes of a record that are read at a time."""
_LARGEST_PICKLE = 1 << 29
"""Bytes of a pickle without its tensors. 100,000 parameters need some 20 MB."""

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_OF_TORCH = frozenset(
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
"""Globals that torch's unpickler constructs itself, apart from those in `_REPLACED`. None of them allocates memory of a
size given in the file.
"""


class Inert:
    """Stand-in for an object of another library: constructor arguments and attributes, and no code."""

    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.attributes = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(f"an object of {type(self).__name__} has the state {state!r} instead of attributes")
        self.attributes = state


_OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler LossScaleConfig",
    "deepspeed.runtime.zero.config ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment fragment_address",
    "deepspeed.utils.tensor_fragment tensor_fragment",
    "deepspeed.checkpoint.universal_checkpoint SubparamShape",
    "argparse Namespace",
    "types SimpleNamespace",
    "pathlib PosixPath",
    "pathlib WindowsPath",
    "pathlib PurePosixPath",
    "pathlib Path",
    "pathlib._local PosixPath",
    "pathlib._local WindowsPath",
)
"""Classes that DeepSpeed, and scripts around it, leave in checkpoints."""


def _stand_in(name: str) -> type[Inert]:
    module, _, own = name.partition(" ")
    return type(own, (Inert,), {"__module__": module, "__qualname__": own})


STAND_INS: dict[str, type[Inert]] = {name: _stand_in(name) for name in _OF_DEEPSPEED}


class AnyTensor(Inert):
    """Stand-in for torch.Tensor, whose constructor would allocate any size given in the file."""


def rebuild_plain(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor without its subclass and its attributes, in place of torch's `_rebuild_from_type_v2`."""
    if function not in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter):
        raise CheckpointError(f"a tensor with attributes is constructed by {function!r}: the file is damaged")
    return function(*arguments)


def parameter_plain(data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
    """Return a parameter without its attributes, in place of torch's `_rebuild_parameter_with_state`."""
    return torch._utils._rebuild_parameter(data, requires_grad, hooks)


_REPLACED: dict[str, Any] = {
    "torch Tensor": AnyTensor,
    "torch._tensor _rebuild_from_type_v2": rebuild_plain,
    "torch._utils _rebuild_parameter_with_state": parameter_plain,
}
"""Globals of torch → their replacements in the pickle. Stage 3 writes tensors with attributes (`ds_id`)."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, whose values start at byte `at`. `read` reads them."""

    file: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        expected, strides = 1, []
        for size in reversed(self.shape):
            strides.append(expected)
            expected *= max(size, 1)
        pairs = zip(self.shape, self.stride, reversed(strides), strict=True)
        return all(size <= 1 or own == wanted for size, own, wanted in pairs)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor, (stop - start,).

        A tensor that is not contiguous is read whole. Raises CheckpointError if the file became shorter.
        """
        stop = self.numel if stop is None else stop
        if self.is_contiguous or not self.numel:
            return self._elements(start, stop - start)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self._elements(0, span).as_strided(self.shape, self.stride).reshape(-1)[start:stop]

    def _elements(self, start: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.dtype)
        if count:
            target: Any = memoryview(values.view(torch.uint8).numpy().data)
            with self.file.open("rb") as file:
                file.seek(self.at + start * self.dtype.itemsize)
                if file.readinto(target) != len(target):
                    raise CheckpointError(f"{self.file} ended early: it was changed while it was read, so start again")
        return values


@dataclass
class PickleFile:
    """The content of a file. Its tensors are on the meta device; `place` returns where one is stored."""

    path: Path
    content: Any = None
    _storages: dict[int, tuple[torch.UntypedStorage, int, int]] = field(default_factory=dict)
    """Address of a storage's C++ object → the storage, which keeps it alive, its place in the file and its bytes there.

    A meta storage grows with the tensors on it, so its own size may exceed that of the record.
    """

    def add(self, storage: torch.UntypedStorage, start: int) -> None:
        self._storages[storage._cdata] = storage, start, storage.nbytes()

    def place(self, tensor: object, name: str) -> FileTensor:
        """Return the place of a tensor, called `name` in errors.

        Raises CheckpointError if it is no tensor, or exceeds its storage.
        """
        if not isinstance(tensor, torch.Tensor):
            shown = "missing" if tensor is None else f"a {type(tensor).__name__}"
            raise CheckpointError(f"{self.path}: {name} is {shown}, and a tensor is expected: use another checkpoint")
        shape, stride, first = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        steps = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
        storage, start, stored = self._storages.get(tensor.untyped_storage()._cdata, (None, 0, 0))
        end = first + sum(steps) + 1 if prod(shape) else 0
        if storage is None or first < 0 or min(stride, default=0) < 0 or end * tensor.dtype.itemsize > stored:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, for which its storage of {stored:,} bytes is too small: "
                "the checkpoint is damaged, use another one"
            )
        return FileTensor(self.path, start + first * tensor.dtype.itemsize, tensor.dtype, shape, stride)


def read_pickle(path: Path) -> PickleFile:
    """Return the content of a file that `torch.save` wrote. Raises CheckpointError, and runs no code of the file."""
    try:
        return _read(path)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, copy all of its files") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be read: it is damaged, use another one") from None
    except Exception as error:  # noqa: BLE001 - the unpickler raises many classes
        raise CheckpointError(f"{path} cannot be read ({reason(error)}): it is damaged, use another one") from None


def _read(path: Path) -> PickleFile:
    with path.open("rb") as file:
        size = path.stat().st_size
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
        _check_name(path, folder.rstrip("/"))
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
        content = _bytes(file, places[pickled], records[pickled])
    content = _with_known_globals(content, path)
    data = folder + "data/"
    stored = {
        name.removeprefix(data): (places[name], info.file_size)
        for name, info in records.items()
        if name.startswith(data)
    }
    return _unpickle(content, path, stored)


def _check_name(path: Path, saved_as: str) -> None:
    """Raise CheckpointError if the file was renamed, since names tell ranks, parameters and states apart.

    saved_as: top folder of the archive. torch.save names it after the file, or "archive" if it got no path.
    """
    if saved_as not in (path.stem, "archive"):
        raise CheckpointError(
            f"{path} was saved as {saved_as}{path.suffix}: files of ranks were swapped or renamed; give every file the "
            "name that it was saved under"
        )


def _place(file: io.BufferedReader, info: zipfile.ZipInfo, size: int, path: Path) -> int:
    """Return the position of a record's first byte. Raises CheckpointError if it is compressed or overruns the file."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) == 30 and header[:4] == b"PK\x03\x04" and info.compress_type == zipfile.ZIP_STORED:
        names = sum(struct.unpack("<HH", header[26:30]))
        start = info.header_offset + 30 + int(names)
        if start + info.file_size <= size and not info.flag_bits & 1:
            return start
    raise CheckpointError(f"{path}: its record {info.filename!r} is compressed, encrypted or cut off: use another one")


def _checksum(file: io.BufferedReader, start: int, length: int) -> int:
    """Return the CRC-32 of a record's bytes, as torch.save writes it. (torch.load does not compare it.)"""
    file.seek(start)
    crc = 0
    while length > 0 and (chunk := file.read(min(length, _CHUNK))):
        crc = zlib.crc32(chunk, crc)
        length -= len(chunk)
    return crc


def _bytes(file: io.BufferedReader, start: int, info: zipfile.ZipInfo) -> bytes:
    file.seek(start)
    return file.read(info.file_size)


def _with_known_globals(content: bytes, path: Path) -> bytes:
    """Return the pickle with the replacements of `_REPLACED`.

    Raises CheckpointError if it names a class or function that is not on the list.
    """
    parts, end = [], 0
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name not in ("GLOBAL", "INST"):
            continue
        if argument not in _OF_TORCH and argument not in STAND_INS:
            name = str(argument).replace(" ", ".")
            raise CheckpointError(
                f"{path} refers to {name}, which no DeepSpeed checkpoint needs. Nothing of the file was executed. Save "
                f"the checkpoint without objects of {name} (in client_state, for example)."
            )
        if position is not None and opcode.name == "GLOBAL" and argument in _REPLACED:
            own = _REPLACED[argument]
            parts += [content[end:position], f"c{own.__module__}\n{own.__qualname__}\n".encode()]
            end = position + len(f"c{argument}\n")
    return b"".join([*parts, content[end:]])


def _unpickle(content: bytes, path: Path, stored: dict[str, tuple[int, int]]) -> PickleFile:
    """Return the unpickled content. stored: name of a storage → its place in the file and its bytes."""
    file = PickleFile(path)
    storages: dict[str, TypedStorage] = {}

    def persistent_load(saved: Any) -> TypedStorage:
        _, kind, name, _, numel = saved
        if name not in storages:
            nbytes = int(numel) * kind.dtype.itemsize
            start, size = stored.get(name, (0, None))
            if nbytes < 0 or size != nbytes:
                found = "none is stored" if size is None else f"{size:,} bytes are stored"
                raise CheckpointError(
                    f"{path} declares a storage of {numel} elements ({nbytes:,} bytes), and {found}: use another one"
                )
            untyped = torch.UntypedStorage(nbytes, device="meta")
            file.add(untyped, start)
            storages[name] = TypedStorage(wrap_storage=untyped, dtype=kind.dtype, _internal=True)
        return storages[name]

    unpickler: Any = Unpickler(io.BytesIO(content), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    with _only([*STAND_INS.values(), *_REPLACED.values()]):
        file.content = unpickler.load()
    return file


@contextmanager
def _only(classes: list[Any]) -> Iterator[None]:
    """Replace torch's list of safe globals by `classes` in the block: the application may have added real classes."""
    former = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals(classes)
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(former)

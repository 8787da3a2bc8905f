"""safetensors files, read and written in parts: memory holds a part of one tensor, however large it is."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from infinity.errors import CheckpointError

_READ = 4 << 20
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""What a Hugging Face folder names its files."""

PART = 1 << 24
"""Elements that are read, converted and written at once."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """A tensor that is not there yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What a file is known by: its size in bytes, and the CRC-32 of its content."""

    nbytes: int
    crc32: int


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a new file, and sync it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), zlib.crc32(content))


def read_crc32(path: Path) -> int:
    """The CRC-32 of a file's content."""
    crc = 0
    buffer = memoryview(bytearray(_READ))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def write_tensors(
    path: Path,
    specs: Mapping[str, Spec],
    parts: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write the tensors `specs` to a new file, and sync it; returns its size and checksum.

    parts: name → the tensor's values in order, in one part or several of any shape, in its dtype. The library's own
    `save_file` wants all of them in memory at once. The format: https://huggingface.co/docs/safetensors
    """
    # Wide ones first, as readers want each tensor aligned to its elements.
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + specs[name].nbytes
        header[name] = {"dtype": _name(specs[name]), "shape": specs[name].shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        head = len(text).to_bytes(8, "little") + text
        file.write(head)
        crc = zlib.crc32(head)
        for name in order:
            before = file.tell()
            for part in parts(name):
                if part.dtype != specs[name].dtype:
                    raise TypeError(f"{name} is to be {specs[name].dtype} and came as {part.dtype}")
                content = part.contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(content)
                crc = zlib.crc32(content, crc)
            if file.tell() - before != specs[name].nbytes:
                raise ValueError(f"{name} is to have {specs[name].nbytes:,} bytes and came as {file.tell() - before:,}")
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(file.tell(), crc)


def _name(spec: Spec) -> str:
    if spec.dtype not in _NAMES:
        raise CheckpointError(f"tensors of {spec.dtype} cannot be written")
    return _NAMES[spec.dtype]


def spec_of(tensors: Any, name: str) -> Spec:
    """tensors: a file opened with `safe_open`."""
    found = tensors.get_slice(name)
    if found.get_dtype() not in DTYPES:
        raise CheckpointError(f"{name} is saved as {found.get_dtype()}, which cannot be read here")
    return Spec(DTYPES[found.get_dtype()], tuple(found.get_shape()))


def read_part(tensors: Any, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a flattened tensor, (stop - start,); only the rows that they are in are read."""
    found = tensors.get_slice(name)
    shape = found.get_shape()
    if not shape or start >= stop:
        whole: torch.Tensor = tensors.get_tensor(name).view(-1)[start:stop]
        return whole
    width = prod(shape[1:])
    first, last = start // width, -(-stop // width)
    rows: torch.Tensor = found[first:last].reshape(-1)
    return rows[start - first * width : stop - first * width]


def parts_of(tensors: Any, name: str) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, `PART` of them at once."""
    numel = prod(tensors.get_slice(name).get_shape())
    for start in range(0, numel, PART):
        yield read_part(tensors, name, start, min(start + PART, numel))

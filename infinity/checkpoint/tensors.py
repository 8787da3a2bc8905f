"""Reads and writes safetensors files in parts, so that memory holds a part of one tensor at a time."""

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
from infinity.inputs import open_input

_READ = 4 << 20
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""File names in a Hugging Face folder."""

PART = 1 << 24
"""Elements read, converted and written at once."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and CRC-32 of its content."""

    nbytes: int
    crc32: int


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write and sync a new file; return its size and checksum. Raises FileExistsError if it exists."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), zlib.crc32(content))


def read_crc32(path: Path) -> int:
    """Return the CRC-32 of a file's content."""
    crc = 0
    buffer = memoryview(bytearray(_READ))
    with open_input(path) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def write_tensors(
    path: Path,
    specs: Mapping[str, Spec],
    parts: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write the tensors `specs` to a new file and sync it; return its size and checksum.

    parts: name → the tensor's values in order, in one or more parts of any shape, in its dtype. safetensors' own
    `save_file` needs all tensors in memory at once. The format: https://huggingface.co/docs/safetensors
    """
    head, starts = header_of(specs, metadata)
    with path.open("xb") as file:
        file.write(head)
        crc = zlib.crc32(head)
        for name in starts:
            before = file.tell()
            for part in parts(name):
                content = bytes_of(name, part, specs[name])
                file.write(content)
                crc = zlib.crc32(content, crc)
            if file.tell() - before != specs[name].nbytes:
                raise ValueError(f"{name} has {file.tell() - before:,} bytes, expected {specs[name].nbytes:,}")
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(file.tell(), crc)


def header_of(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the head of a file, and name → offset of a tensor in what follows, in the order of the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    # Widest dtype first, since readers need each tensor aligned to its element size.
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        spec = specs[name]
        if spec.dtype not in _NAMES:
            raise CheckpointError(f"tensors of {spec.dtype} cannot be written")
        starts[name], end = end, end + spec.nbytes
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": (starts[name], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def bytes_of(name: str, part: torch.Tensor, spec: Spec) -> memoryview:
    """Return the bytes of a part of a tensor. Raises TypeError if its dtype differs."""
    if part.dtype != spec.dtype:
        raise TypeError(f"a part of {name} is {part.dtype}, expected {spec.dtype}")
    content: memoryview = part.contiguous().view(-1).view(torch.uint8).numpy().data
    return content


def spec_of(tensors: Any, name: str) -> Spec:
    """Return dtype and shape of a tensor. tensors: a file opened with `safe_open`."""
    stored = tensors.get_slice(name)
    if stored.get_dtype() not in DTYPES:
        raise CheckpointError(f"{name} is saved as {stored.get_dtype()}, which Infinity cannot read")
    return Spec(DTYPES[stored.get_dtype()], tuple(stored.get_shape()))


def read_part(tensors: Any, name: str, start: int, stop: int, place: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return elements [start, stop) of a flattened tensor, (stop - start,). Reads only the rows that hold them.

    place: one slice for each dimension, with bounds: of that part of the tensor instead.
    """
    stored = tensors.get_slice(name)
    shape = [part.stop - part.start for part in place] or stored.get_shape()
    if not shape or start >= stop:
        whole: torch.Tensor = tensors.get_tensor(name)[place].reshape(-1)[start:stop]
        return whole
    width, top = prod(shape[1:]), place[0].start if place else 0
    first, last = start // width, -(-stop // width)
    part = (slice(top + first, top + last), *place[1:])
    rows: torch.Tensor = stored[part].reshape(-1)
    return rows[start - first * width : stop - first * width]


def parts_of(tensors: Any, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order, at most `PART` at once."""
    numel = prod(tensors.get_slice(name).get_shape())
    for start in range(0, numel, PART):
        yield read_part(tensors, name, start, min(start + PART, numel))

"""Writes and reads ranges of the elements of tensors in safetensors files, in any order."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from infinity.checkpoint.tensors import FileRecord, Spec, bytes_of, header_of
from infinity.errors import CheckpointError
from infinity.inputs import open_input


class PiecewiseFile:
    """A new safetensors file of the tensors `specs`, written in pieces and in any order."""

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        head, self._starts = header_of(specs)
        self._path, self._specs, self._first = path, specs, len(head)
        self._left = sum(spec.nbytes for spec in specs.values())
        self._checksum = PiecewiseChecksum()
        self._file = path.open("xb", buffering=0)
        self._write(0, memoryview(head))

    @property
    def is_whole(self) -> bool:
        """True once all elements are written."""
        return not self._left

    def write(self, name: str, start: int, part: torch.Tensor) -> None:
        """Write elements of a tensor from number `start` of its flattened form on. Write each element once."""
        spec = self._specs[name]
        content = bytes_of(name, part, spec)
        self._write(self._first + self._starts[name] + start * spec.dtype.itemsize, content)
        self._left -= len(content)

    def finish(self) -> FileRecord:
        """Sync the file; return its size and checksum."""
        if self._left:
            raise ValueError(f"{self._path.name} lacks {self._left:,} bytes")
        os.fsync(self._file.fileno())
        self.close()
        return FileRecord(self._path.stat().st_size, self._checksum.of_whole)

    def close(self) -> None:
        """Close the file, even if it is incomplete. Idempotent."""
        self._file.close()

    def _write(self, offset: int, content: memoryview) -> None:
        self._checksum.add(offset, content)
        while content:
            count = os.pwrite(self._file.fileno(), content, offset)
            content, offset = content[count:], offset + count


class PiecewiseChecksum:
    """CRC-32 of a content whose pieces arrive in any order. Each byte is added once."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}
        """Start of a run of adjacent pieces → its end, and the CRC-32 of its bytes."""
        self._starts: dict[int, int] = {}
        """End of a run → its start."""

    def add(self, start: int, content: memoryview) -> None:
        if not content:
            return
        stop, crc = start + len(content), zlib.crc32(content)
        if start in self._starts:
            before = self._starts.pop(start)
            crc = combined_crc32(self._runs[before][1], crc, stop - start)
            start = before
        if stop in self._runs:
            end, after = self._runs.pop(stop)
            crc = combined_crc32(crc, after, end - stop)
            stop = end
        self._runs[start], self._starts[stop] = (stop, crc), start

    @property
    def of_whole(self) -> int:
        """CRC-32 of the content from byte 0 on, which must have no gaps."""
        ((_, (_, crc)),) = self._runs.items()
        return crc


_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: bit 31 - k is the coefficient of x^k."""


def combined_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two adjacent parts from theirs. nbytes: of the second part.

    CRC-32 is linear over GF(2): bytes after a part multiply its polynomial by x^8 each, modulo the CRC's. The same as
    zlib's `crc32_combine`, which Python's zlib lacks.
    """
    return _product(_power(8 * nbytes), first) ^ second


def _product(a: int, b: int) -> int:
    """Return a * b modulo the CRC's polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=1024)
def _power(exponent: int) -> int:
    """Return x^exponent modulo the CRC's polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square, exponent = _product(square, square), exponent >> 1
    return power


class TensorFile:
    """Ranges of the tensors of a safetensors file, read without the rest of their rows, for which `safe_open` has no
    call. The file must have been checked by `safe_open`.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        with open_input(path) as file:
            length = int.from_bytes(file.read(8), "little")
            self._first = 8 + length
            self._tensors = json.loads(file.read(length))

    def read(self, name: str, runs: Iterable[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of `runs`, one after the other, (n,) in the tensor's dtype.

        runs: (first element in the flattened tensor, number of elements). Raises OSError, and CheckpointError if the
        file ends before.
        """
        runs, width = list(runs), dtype.itemsize
        values = torch.empty(sum(numel for _, numel in runs), dtype=dtype)
        memory: memoryview = values.view(torch.uint8).numpy().data
        first = self._first + self._tensors[name]["data_offsets"][0]
        with open_input(self._path) as file:
            for start, numel in runs:
                part, memory = memory[: numel * width], memory[numel * width :]
                place = first + start * width
                while part:
                    count = os.preadv(file.fileno(), [part], place)
                    if not count:
                        raise CheckpointError(f"{self._path} was cut short while it was read: use another checkpoint")
                    part, place = part[count:], place + count
        return values

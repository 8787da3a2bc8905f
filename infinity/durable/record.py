"""The record of a commit: all of a step except the states in its slots. One small file per rank.

    "INFDUR03" | bytes of the rest, u64 | CRC-32, u32 | bytes of the JSON, u32 | JSON | blobs

Numbers are little-endian. The JSON names the bytes of each blob. Commits alternate between two files, so a record that
was cut short leaves the previous one.

The CRC-32 is of the first 8 bytes and of the rest; before version 03 of the rest alone. Every version has this head, so
that the checksum tells a damaged version from a newer one.

A record proves the files that it belongs to, which may have been copied at another moment: it has a digest of each
extent (`infinity.tiers.digests`), the digest of the manifest's layout, and the job that wrote it, equal on all ranks.
Version 01 has none of them.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infinity.checkpoint.format import Progress
from infinity.errors import CheckpointError, StorageError
from infinity.inputs import open_input, parse_json
from infinity.tiers.digests import Digests

CLIENT_STATE, RNG, BUFFERS = "client_state", "rng", "buffers"
DIGESTS, CHECKSUMS = "digests", "checksums"
"""Names of a record's blobs. The last has the checksums of the states' blocks, and is empty without `aio.checksum`."""

_FORMAT = b"INFDUR"
_MAGIC = _FORMAT + b"03"
_FORMER = (_FORMAT + b"01", _FORMAT + b"02")
"""Readable versions whose checksum does not cover the version."""

_HEAD = struct.Struct("<8sQI")
_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 34
"""Bytes of the largest record. It holds the model's buffers and client_state."""


@dataclass(frozen=True)
class Proof:
    """Names of the files that belong to a record, besides the digests of states. Empty in a record of version 01."""

    job: str = ""
    """Drawn by each start of a run, equal on all its ranks: the same step of another run, or of a copy, has another."""
    layout: str = ""
    """Digest of the manifest's layout."""
    block: int = 0
    """Bytes of a checksum's block in the digests of states."""


@dataclass(frozen=True)
class Record:
    """A committed step of one rank."""

    number: int
    """Number of the commit in its generation, from 1."""
    progress: Progress
    unit_steps: list[list[int]]
    """Number of updates of each parameter, by unit and slot."""
    slots: bytes
    """Slot of each durable extent, in the order of the plan."""
    blobs: Mapping[str, bytes]
    """RNG states, client_state, buffers, digests and checksums, by name."""
    proof: Proof = field(default_factory=Proof)

    @property
    def digests(self) -> Digests | None:
        """Digests of the extents in their slots; None in a record of version 01."""
        return Digests(self.proof.block, self.blobs[DIGESTS]) if self.proof.block and DIGESTS in self.blobs else None

    def packed(self) -> bytes:
        """Return the bytes of the record's file. Raises StorageError if they are more than a file may have."""
        named = {"slots": self.slots, **self.blobs}
        content = {
            "number": self.number,
            "progress": asdict(self.progress),
            "unit_steps": [_shortened(steps) for steps in self.unit_steps],
            "proof": asdict(self.proof),
            "blobs": {name: len(blob) for name, blob in named.items()},
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        nbytes = _LENGTH.size + len(text) + sum(map(len, named.values()))
        if nbytes > _LARGEST:
            raise StorageError(
                f"client_state and the model's buffers make a record of {nbytes} bytes, and the limit is {_LARGEST}: "
                "pass less client_state, or make buffers that need not be saved non-persistent"
            )
        rest = b"".join((_LENGTH.pack(len(text)), text, *named.values()))
        return _HEAD.pack(_MAGIC, len(rest), _checksum(_MAGIC, rest)) + rest


def _checksum(magic: bytes, rest: bytes) -> int:
    return zlib.crc32(rest, 0 if magic in _FORMER else zlib.crc32(magic))


def read_record(path: Path) -> Record | None:
    """Return the record of a file; None if it does not exist, is a link, or was cut short or altered.

    Raises CheckpointError if it is of a newer version of Infinity.
    """
    if path.is_symlink():
        return None
    try:
        with open_input(path) as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            magic, nbytes, crc32 = _HEAD.unpack(head)
            version = magic.removeprefix(_FORMAT)
            if version == magic or not version.isdigit():
                return None
            if nbytes > min(os.fstat(file.fileno()).st_size, _LARGEST):
                return None
            rest = file.read(nbytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe or a device
            return None
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its drive and permissions") from error
    if len(rest) < max(nbytes, _LENGTH.size) or _checksum(magic, rest) != crc32:
        return None
    if magic > _MAGIC:
        raise CheckpointError(f"{path} has format version {version.decode()}: use a newer Infinity")
    try:
        return _unpacked(rest)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error):
        return None  # written by another version


def _unpacked(rest: bytes) -> Record:
    """Return the record in the bytes after a file's head. Raises errors of many classes."""
    position = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
    content = parse_json(rest[_LENGTH.size : position])
    blobs = {}
    for name, length in content["blobs"].items():
        blobs[name] = rest[position : position + length]
        position += length
    return Record(
        number=int(content["number"]),
        progress=Progress(**content["progress"]),
        unit_steps=[_restored(steps) for steps in content["unit_steps"]],
        slots=blobs.pop("slots"),
        blobs=blobs,
        proof=Proof(**content.get("proof", {})),
    )


def write_record(path: Path, record: Record) -> None:
    """Overwrite the second-last record with this one and wait until it has reached the drive, with the name of a new
    file.

    Raises OSError, and StorageError, before anything is written, for a record that is too large.
    """
    content = record.packed()
    is_new = not path.exists()
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
        try:
            _overwrite(fd, content)
            os.ftruncate(fd, len(content))
            os.fsync(fd)
            if is_new:
                sync_folder(path.parent)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder have reached the drive. Raises OSError."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def confirm(path: Path) -> None:
    """Write a record again that was read, with the same bytes, and wait until it has reached the drive.

    The process that wrote it may have ended before its sync, or that sync may have failed, after which another one
    would return at once. Raises OSError.
    """
    with _opened(path, os.O_RDWR | os.O_NOFOLLOW) as fd:
        with open(fd, "rb", closefd=False) as file:
            _overwrite(fd, file.read())
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _overwrite(fd: int, content: bytes) -> None:
    """Write a file from its start. One system call transfers less than 2 GiB."""
    left = memoryview(content)
    while left:
        left = left[os.pwrite(fd, left, len(content) - len(left)) :]


def invalidate(path: Path, *, sync: bool) -> None:
    """Make a file hold no record. sync: wait until that has reached the drive. Raises OSError."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
        os.pwrite(fd, bytes(len(_MAGIC)), 0)
        if sync:
            os.fsync(fd)


def _shortened(steps: list[int]) -> list[int]:
    """Return [count, number] if all numbers are equal, the usual case, else [-1, *numbers]."""
    return [len(steps), steps[0]] if steps and len(set(steps)) == 1 else [-1, *steps]


def _restored(shortened: list[int]) -> list[int]:
    count, *numbers = shortened
    return numbers if count < 0 else numbers * count

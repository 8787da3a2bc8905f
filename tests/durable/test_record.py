"""Records of commits: what is written is read, and anything else counts as no record."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from infinity.checkpoint.format import Progress
from infinity.durable import record as module
from infinity.durable.record import Record, confirm, read_record, write_record
from infinity.errors import CheckpointError, StorageError
from support.records import of_version

RECORD = Record(
    number=7,
    progress=Progress(7, 1, [{"lr": 0.1, "betas": [0.9, 0.95]}], {"last_epoch": 7}, None),
    unit_steps=[[6, 6, 6], [], [1, 2]],
    slots=bytes([0, 1, 1]),
    blobs={"rng": b"\x00random", "client_state": b""},
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path / "record", RECORD)
    assert read_record(tmp_path / "record") == RECORD
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o600


def test_a_shorter_record_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    longer = Record(8, RECORD.progress, RECORD.unit_steps, RECORD.slots, {"rng": bytes(10_000)})
    write_record(tmp_path / "record", longer)
    write_record(tmp_path / "record", RECORD)
    assert read_record(tmp_path / "record") == RECORD
    assert (tmp_path / "record").read_bytes() == RECORD.packed()


@pytest.mark.parametrize("length", range(0, len(RECORD.packed()), 7))
def test_a_record_that_was_cut_short_counts_as_none(tmp_path: Path, length: int) -> None:
    (tmp_path / "record").write_bytes(RECORD.packed()[:length])
    assert read_record(tmp_path / "record") is None


@given(st.integers(0, len(RECORD.packed()) - 1), st.integers(1, 255))
def test_a_record_with_another_byte_counts_as_none(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    content = bytearray(RECORD.packed())
    content[place] ^= change
    path = tmp_path_factory.mktemp("records") / "record"
    path.write_bytes(content)
    assert read_record(path) is None


@pytest.mark.parametrize("version", [b"01", b"02", b"03"])
def test_a_damaged_version_is_no_newer_one(tmp_path: Path, version: bytes) -> None:
    """The record counts as none, since the run would be refused otherwise. The checksum of former versions covers the
    content alone: their record is read if the damage leads from one to the other.
    """
    content = of_version(RECORD.packed(), version)
    path = tmp_path / "record"
    path.write_bytes(content)
    assert read_record(path) == RECORD
    for place, change in itertools.product(range(8), range(1, 256)):
        path.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
        damaged = path.read_bytes()[6:8]
        is_former = place == 7 and {version, damaged} == {b"01", b"02"}
        assert read_record(path) == (RECORD if is_former else None), (place, change)


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(of_version(b"another content", b"04", head=0))
    with pytest.raises(CheckpointError, match=r"record has format version 04: use a newer Infinity"):
        read_record(tmp_path / "record")


def test_a_missing_record_and_a_pipe_count_as_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "record") is None
    os.mkfifo(tmp_path / "pipe")
    assert read_record(tmp_path / "pipe") is None


def test_a_record_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path / "record", RECORD)
    head = module._HEAD.size
    monkeypatch.setattr(module, "_LARGEST", len(RECORD.packed()) - head)
    write_record(tmp_path / "record", RECORD)
    assert read_record(tmp_path / "record") == RECORD
    larger = Record(8, RECORD.progress, RECORD.unit_steps, RECORD.slots, {**RECORD.blobs, "client_state": b"1"})
    with pytest.raises(StorageError, match="pass less client_state"):
        write_record(tmp_path / "record", larger)
    with pytest.raises(StorageError):
        write_record(tmp_path / "another", larger)
    assert not (tmp_path / "another").exists()
    assert read_record(tmp_path / "record") == RECORD


def test_all_bytes_are_written_whatever_a_system_call_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux transfers less than 2 GiB at once."""
    written, pwrite = bytearray(len(RECORD.packed())), os.pwrite

    def short(fd: int, content: memoryview, offset: int) -> int:
        count = pwrite(fd, content[:7], offset)
        written[offset : offset + count] = content[:count]
        return count

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("reads less than 2 GiB at once"))
    write_record(tmp_path / "record", RECORD)
    assert read_record(tmp_path / "record") == RECORD
    written[:] = bytes(len(written))
    confirm(tmp_path / "record")
    assert bytes(written) == RECORD.packed()

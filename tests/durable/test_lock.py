"""Locks of durable runs: one trainer, any number of readers."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infinity.durable.folder import Lock, check_unheld, unchanged
from infinity.errors import StorageError
from infinity.observe.log import logger


class Seen(logging.Handler):
    """Sets an event with the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


def test_a_start_waits_for_readers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Lock(tmp_path, 0).close()
    seen = Seen()
    logger.addHandler(seen)
    try:
        with ThreadPoolExecutor() as pool:
            with unchanged(tmp_path), unchanged(tmp_path):
                starting = pool.submit(Lock, tmp_path, 0)
                assert seen.event.wait(60) and not starting.done()
            held = starting.result(60)
    finally:
        logger.removeHandler(seen)
    assert [record.getMessage() for record in caplog.records] == [
        f"Waiting for a process that reads the durable run {tmp_path}"
    ]
    with pytest.raises(StorageError, match="in use by another process"), unchanged(tmp_path):
        pass
    with pytest.raises(StorageError, match="in use by another process"):
        Lock(tmp_path, 0)
    held.close()
    check_unheld(tmp_path, 0)


def test_a_lock_whose_file_was_removed_is_not_held(tmp_path: Path) -> None:
    """The holder of a lock may remove its file after another process opened it, and before that one locks it."""
    former = Lock(tmp_path, 0)
    before_flock.append(lambda: former.close(remove=True))
    held = Lock(tmp_path, 0)
    assert not before_flock
    with pytest.raises(StorageError, match="in use by another process"):
        Lock(tmp_path, 0)
    held.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_forked_child_holds_no_lock(tmp_path: Path) -> None:
    """Workers of a data loader outlive a trainer that is killed."""
    held = Lock(tmp_path, 0)
    (wait, end), (begun, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(begin, b".")
        os.read(wait, 1)
        os._exit(0)
    os.read(begun, 1)
    try:
        with pytest.raises(StorageError, match="in use by another process"):
            Lock(tmp_path, 0)
        held.close()
        Lock(tmp_path, 0).close()
    finally:
        for pipe in (end, wait, begun, begin):
            os.close(pipe)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked: No locks available; name a folder on a local drive"):
        Lock(tmp_path, 0)
    assert not list(tmp_path.iterdir())


before_flock: list[Callable[[], None]] = []
"""Called once before the next file is locked."""


def _audit(event: str, _: object) -> None:
    if event == "fcntl.flock" and before_flock:
        before_flock.pop()()


sys.addaudithook(_audit)

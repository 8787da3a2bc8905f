"""Selection of the I/O engine, and errors if the kernel rejects one."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from infinity.errors import StorageError
from infinity.native import _aio
from infinity.tiers import io
from infinity.tiers.io import io_uring_state, open_engine

SIZES = {"block_size": 4096, "queue_depth": 2, "threads": 1}
NO_URING = io_uring_state()
needs_uring = pytest.mark.skipif(bool(NO_URING), reason=NO_URING)


@pytest.fixture
def faults() -> Iterator[Any]:
    yield _aio._inject
    _aio._inject([])


def refused(name: str, error: int, monkeypatch: pytest.MonkeyPatch, text: str = "refused") -> None:
    """Make engines fail with `error` if their backend's name starts with `name`."""
    real = _aio.Engine

    def make(*sizes: int, backend: str = "") -> _aio.Engine:
        if backend.startswith(name):
            raise OSError(error, text)
        return real(*sizes, backend=backend)

    monkeypatch.setattr(io._aio, "Engine", make)


def test_sizes_are_passed_on() -> None:
    with open_engine(block_size=8192, queue_depth=3, threads=2) as engine:
        assert (engine.block_size, engine.queue_depth, engine.threads) == (8192, 3, 2)


def test_libaio_is_the_best_aio_of_this_build() -> None:
    with open_engine("libaio", **SIZES) as engine:
        assert engine.backend == next(name for name in _aio.backends() if name != "io_uring")


@needs_uring
def test_io_uring_when_asked_for() -> None:
    with open_engine("io_uring", **SIZES) as engine:
        assert engine.backend == "io_uring"


@needs_uring
@pytest.mark.parametrize("preferred", ["io_uring", "libaio"])
def test_auto_takes_the_better_one(monkeypatch: pytest.MonkeyPatch, preferred: str) -> None:
    other = {"io_uring": "libaio", "libaio": "io_uring"}[preferred]
    monkeypatch.setattr(io, "AUTO", (preferred, other))
    with open_engine(**SIZES) as engine:
        assert (engine.backend == "io_uring") == (preferred == "io_uring")


def test_auto_falls_back_in_silence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(io, "AUTO", ("io_uring", "libaio"))
    refused("io_uring", errno.EPERM, monkeypatch, "kernel.io_uring_disabled is 2")
    with caplog.at_level(logging.DEBUG, "infinity"), open_engine(**SIZES) as engine:
        assert "aio" in engine.backend
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "kernel.io_uring_disabled is 2" in caplog.text or NO_URING in caplog.text


def test_one_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("io_uring", errno.EPERM, monkeypatch, "kernel.io_uring_disabled is 2; or use libaio (aio.engine)")
    assert io_uring_state() == NO_URING or "io_uring_disabled is 2" in io_uring_state()
    with pytest.raises(StorageError, match=r"^io_uring: .*(libaio|auto)"):
        open_engine("io_uring", **SIZES)


def test_a_build_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io._aio, "backends", lambda: ["kernel aio"])
    assert io_uring_state() == 'this build has no io_uring; write another "engine" in the section aio, or "auto"'
    with pytest.raises(StorageError, match="this build has no io_uring"):
        open_engine("io_uring", **SIZES)
    with open_engine(**SIZES) as engine:
        assert engine.backend == "kernel aio"


@pytest.mark.parametrize(("engine", "reasons"), [("auto", 2), ("libaio", 1), ("io_uring", 1)])
def test_nothing_left_to_try(faults: Any, engine: str, reasons: int) -> None:
    """The error has the reasons of both engines if either would do."""
    faults([{"where": "setup", "error": errno.EAGAIN, "times": -1}])
    with pytest.raises(StorageError) as caught:
        open_engine(engine, **SIZES)
    tried = reasons - (engine != "libaio" and "this build has no" in NO_URING)
    assert str(caught.value).count("cannot set up asynchronous I/O") == tried
    assert engine == "io_uring" or "raise fs.aio-max-nr" in str(caught.value)

"""Files, memory, engines and injected faults for the tests of infinity.native._aio."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from infinity.native import _aio

BLOCK = 4096

hypothesis.settings.register_profile("few", max_examples=4)  # of 100: for sanitized modules (tests/sanitize/run)


class Memory:
    """Page-aligned memory that tests read and write by slices."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def __getitem__(self, where: slice) -> bytes:
        return self._map[where]

    def __setitem__(self, where: slice, values: bytes) -> None:
        self._map[where] = values


class Store:
    """A file and its native `File`.

    mode "direct": as in use; "buffered": without O_DIRECT; "seam": the direct descriptor is a buffered one, so that the
    kernel makes the short transfers that faults ask for, of any length.
    """

    def __init__(self, path: Path, nbytes: int, mode: str) -> None:
        self.path = path
        self._fds = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600)]
        os.ftruncate(self._fds[0], nbytes)
        if mode != "buffered":
            self._fds.append(os.open(path, os.O_RDWR | (os.O_DIRECT if mode == "direct" else 0)))
        self.file = _aio.File(self._fds[1] if mode != "buffered" else -1, self._fds[0], str(path))

    def content(self) -> bytes:
        return self.path.read_bytes()

    def fill(self, values: bytes) -> bytes:
        self.path.write_bytes(values)
        os.fsync(self._fds[0])
        return values

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fds[0], nbytes)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


@functools.cache
def io_uring_refused() -> str:
    """Return why the kernel or a container forbids io_uring; "" if it is allowed."""
    try:
        _aio.Engine(backend="io_uring").close()
    except PermissionError as error:
        return str(error.strerror)
    return ""


@pytest.fixture(params=_aio.backends())
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "io_uring" and (reason := io_uring_refused()):
        pytest.skip(f"this machine does not allow io_uring: {reason}")
    return name


@pytest.fixture(params=["direct", "buffered"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory() -> Callable[[int], Memory]:
    """memory(nbytes) -> Memory"""
    return Memory


@pytest.fixture
def scramble() -> Callable[..., bytes]:
    """scramble(nbytes, seed=0) -> bytes that differ everywhere"""
    return lambda nbytes, seed=0: random.Random(seed).randbytes(nbytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """store(nbytes, mode="direct", folder=tmp_path) -> Store"""
    made: list[Store] = []

    def make(nbytes: int, mode: str = "direct", folder: Path = tmp_path) -> Store:
        made.append(Store(folder / f"store{len(made)}", nbytes, mode))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[dict[tuple[object, ...], _aio.Engine]]:
    """Engines for all tests, since the kernel takes some 20 ms to destroy a context."""
    engines: dict[tuple[object, ...], _aio.Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(
    backend: str, shared_engines: dict[tuple[object, ...], _aio.Engine], request: pytest.FixtureRequest
) -> Iterator[Callable[..., _aio.Engine]]:
    """engine(block_size=BLOCK, queue_depth=8, threads=1, own=False) -> Engine on `backend`,
    of this test alone if own"""
    with contextlib.ExitStack() as stack:

        def make(block_size: int = BLOCK, queue_depth: int = 8, threads: int = 1, own: bool = False) -> _aio.Engine:
            key = (block_size, queue_depth, threads, backend, "faults" in request.fixturenames)
            if own:
                return stack.enter_context(_aio.Engine(*key[:3], backend=backend))
            if key not in shared_engines:
                shared_engines[key] = _aio.Engine(*key[:3], backend=backend)
            return shared_engines[key]

        yield make
        _aio._release_held()


@pytest.fixture
def faults(engine: Any) -> Iterator[Callable[..., None]]:
    """faults({...}, ...): inject faults into the engines of this test, from now on."""

    def set_faults(*faults: dict[str, object]) -> None:
        _aio._inject(list(faults) or [{"where": "nowhere"}])

    set_faults()
    yield set_faults
    _aio._inject([])
    _aio._release_held()


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one, for sweeps with very many small synchronous writes."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="infinity-test-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of a few MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount, image = tmp_path / "mount", tmp_path / "image"
    mount.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]]
    else:
        with image.open("wb") as file:
            file.truncate(8 << 20)
        commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine cannot mount a small {request.param}: {error}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=False, capture_output=True)

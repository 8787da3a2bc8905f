"""A process that is killed (SIGKILL) in the middle of a burst of writes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BLOCK = 4096
PIECES = 64  # of a request
REQUESTS = 32

# Opens a file of REQUESTS * PIECES blocks, starts a burst of writes, and says after each of them that it is done. The
# first 8 bytes of a block are its number, the last 8 bytes as well.
PROGRAM = """
import ctypes, mmap, os, signal, sys
from infinity.native import _aio

folder, name, backend, mode, pieces, requests, bursts = sys.argv[1:5] + [int(x) for x in sys.argv[5:]]
nbytes = 4096 * pieces
flags = os.O_RDWR | (0 if name else os.O_TMPFILE)
buffered = os.open(os.path.join(folder, name), flags, 0o600)
direct = os.open(f"/proc/self/fd/{buffered}", os.O_RDWR | os.O_DIRECT) if mode == "direct" else -1
os.posix_fallocate(buffered, 0, requests * nbytes)
memory = mmap.mmap(-1, requests * nbytes)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for block in range(requests * pieces):
    memory[block * 4096 : (block + 1) * 4096] = (2**32 + block).to_bytes(8, "little") * 512
io, file = _aio.Engine(4096, 16, 2, backend=backend), _aio.File(direct, buffered, name)
for burst in range(bursts):
    started = [io.write(file, i * nbytes, address + i * nbytes, nbytes) for i in range(requests)]
    for i, request in enumerate(started):
        request.wait()
        os.write(1, f"{i}\\n".encode())
signal.pause()
"""


@contextmanager
def killed_after(lines: int, folder: Path, name: str, *arguments: object) -> Iterator[list[int]]:
    """Yield the output of a process with PROGRAM that is killed after it has printed `lines` lines."""
    command = [sys.executable, "-c", PROGRAM, str(folder), name, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        said += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        process.wait()
    assert process.returncode == -9
    yield said


def until(what: Any) -> None:
    """Wait for a condition, since a kernel thread ends io_uring's operations after their process."""
    for _ in range(3000):
        if what():
            return
        time.sleep(0.01)
    pytest.fail("it does not happen")


def is_the_only_one(fd: int) -> bool:
    """Return True if nothing else has the file open, without which the kernel refuses a write lease."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        pytest.skip(f"this file system has no leases, so that the end of what was in flight cannot be seen: {error}")
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@pytest.fixture
def free(small_disk: Path) -> Any:
    def blocks() -> int:
        os.sync()
        return os.statvfs(small_disk).f_bfree

    return blocks


def test_of_an_anonymous_file_nothing_is_left(small_disk: Path, free: Any, backend: str, mode: str) -> None:
    before, names = free(), os.listdir(small_disk)
    with killed_after(20, small_disk, "", backend, mode, 8, 16, 1_000_000):
        until(lambda: free() == before)
    assert os.listdir(small_disk) == names


@pytest.mark.parametrize("lines", [1, 10])
def test_of_a_named_file_each_block_is_old_or_new(
    tmp_path: Path, scramble: Any, backend: str, mode: str, lines: int
) -> None:
    """Each block is old or new, and blocks whose write completed are new."""
    path = tmp_path / "named"
    path.write_bytes(b"".join(block.to_bytes(8, "little") * 512 for block in range(REQUESTS * PIECES)))
    with killed_after(lines, tmp_path, "named", backend, mode, PIECES, REQUESTS, 1) as done, path.open("rb+") as file:
        until(lambda: is_the_only_one(file.fileno()))
        content = file.read()
    assert len(content) == REQUESTS * PIECES * BLOCK
    for block in range(REQUESTS * PIECES):
        values = content[block * BLOCK : (block + 1) * BLOCK]
        number = int.from_bytes(values[:8], "little")
        assert values == values[:8] * 512, f"block {block} is torn"
        assert number in ((2**32 + block,) if block // PIECES in done else (block, 2**32 + block))

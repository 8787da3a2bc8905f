"""The kernel grants less than requested: nothing is used in part, and nothing waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from infinity.native import _aio

BLOCK = 4096

REGISTER_IN_PART = """
import ctypes, os, resource, sys
from infinity.native import _aio
# As much may be locked as one ring registers, not two; and no capability to lock more.
nbytes = 1 << 20
resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes * 3 // 2, nbytes * 3 // 2))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDWR)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
file = _aio.File(-1, fd, "file")
with _aio.Engine(4096, 8, 2, backend="io_uring") as engine:
    address = libc.mmap(None, nbytes, 3, 0x22, -1, 0)
    print("registered", engine.register(address, nbytes))
    assert libc.mmap(address, nbytes, 3, 0x22 | 0x10, -1, 0) == address  # other pages at the same address
    engine.read(file, 0, address, nbytes).wait(10)
    assert ctypes.string_at(address, nbytes) == b"7" * nbytes, "read into pages that are gone"
"""


def test_registered_in_part_is_not_registered(store: Any, backend: str) -> None:
    if backend != "io_uring":
        pytest.skip("only io_uring registers buffers")
    disk = store(1 << 20, "buffered")
    disk.fill(b"7" * (1 << 20))
    # LeakSanitizer traces the process at its end, which the kernel refuses for one that has dropped its rights.
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0"
    result = subprocess.run(
        [sys.executable, "-c", REGISTER_IN_PART, str(disk.path)],
        env={**os.environ, "ASAN_OPTIONS": options},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "registered False\n"


def test_a_forked_child_cannot_wait_for_its_parents_requests(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    faults({"where": "event", "hold": True})
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine(own=True)
    request = io.read(disk.file, 0, buffer.address, BLOCK)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            request.wait()
        except RuntimeError as error:
            code = 0 if "forked children" in str(error) else 2
        io.register(buffer.address, BLOCK)
        io.unregister(buffer.address)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    while _aio._release_held() == 0:
        pass
    assert request.wait(10) == BLOCK


def test_an_engine_whose_queue_is_lost_ends(store: Any, memory: Any, engine: Any, faults: Any) -> None:
    """The idle engine sleeps, and closes."""
    faults({"where": "reap", "error": 22, "times": -1})
    disk, buffer, io = store(BLOCK), memory(BLOCK), engine(own=True)
    for _ in range(2):
        with pytest.raises(OSError):
            io.read(disk.file, 0, buffer.address, BLOCK).wait(10)
    io.close()

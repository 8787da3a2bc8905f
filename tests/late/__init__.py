"""A torch accelerator for tests, whose copies and compute are late: they run when somebody waits for them.

    import late
    late.load()              # compiles backend.cpp once; from then on torch.accelerator is this device, in this process
    late.set_mode("random")  # how much runs that nobody waited for
    late.set_seed(3)         # the order in which it runs

`torch.device("late", 0)` and 1 have memory, streams and events of their own, which `torch.Stream`, `torch.Event` and
`torch.accelerator` know. Each operator is queued on the calling thread's current stream. The kernels are the CPU's, so
that results are the CPU's bit for bit, on one thread (`load` calls `torch.set_num_threads(1)`). A wait that is missing
shows: memory is 0xFF (NaN) before a kernel writes it and after it is freed, a copy to pinned host memory fills it with
0xFF when it is issued, and a copy from pinned memory reads its source only when it runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import torch

from late import module

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "late"
MODES = ("lazy", "random", "eager")

_library: ctypes.CDLL | None = None


class Counters(ctypes.Structure):
    """Counts since the process began; `kernels_at_once`: calls whose values the host needed."""

    kernels_queued: int
    kernels_executed: int
    kernels_at_once: int
    copies_queued: int
    copies_executed: int
    inference_failed: int
    most_queued: int
    waits: int
    _fields_ = tuple((name, ctypes.c_int64) for name in __annotations__)


def load() -> None:
    """Register the device "late" with torch, for the rest of this process. Idempotent."""
    global _library
    if _library is not None:
        return
    library = ctypes.CDLL(str(compiled()))
    library.late_set_seed.argtypes = [ctypes.c_uint64]
    library.late_set_limit.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.late_pending.restype = ctypes.c_int64
    library.late_at_once.restype = ctypes.c_char_p
    library.late_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.late_unpin.argtypes = [ctypes.c_void_p]
    torch.utils.rename_privateuse1_backend("late")
    library.late_register()
    torch._register_device_module("late", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.set_num_threads(1)
    _library = library
    set_mode(os.environ.get("LATE_MODE", "random"))
    set_seed(int(os.environ.get("LATE_SEED", "0")))


def compiler() -> str | None:
    """Return the C++ compiler; without one the tests of this device are skipped."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compiled() -> Path:
    """Return the shared library, compiled on the first call for these sources and this torch."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".h"))
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {compiler()}".encode())
    for path in sources:
        key.update(path.read_bytes())
    library = BUILD / f"{key.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together compile once
        if not library.exists():
            _compile(HERE / "backend.cpp", library)
    return library


def _compile(source: Path, library: Path) -> None:
    root = Path(torch.__file__).parent
    made = library.with_suffix(f".{os.getpid()}")
    command = [
        str(compiler()), "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        "-isystem", str(root / "include"), "-isystem", str(root / "include/torch/csrc/api/include"),
        str(source), "-o", str(made),
        f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        raise RuntimeError(f"{source} does not compile:\n{finished.stderr}")
    made.replace(library)


def _loaded() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("The device is not loaded. Call late.load() first.")
    return _library


def set_seed(seed: int) -> None:
    """Seed the order in which queued work runs."""
    _loaded().late_set_seed(seed)


def set_limit(index: int, nbytes: int | None) -> None:
    """Let torch allocate at most `nbytes` on a device, beyond which it raises OutOfMemoryError; None: any number."""
    _loaded().late_set_limit(index, (1 << 64) - 1 if nbytes is None else nbytes)


def set_mode(mode: str) -> None:
    """Set how much runs besides the work that is waited for: "lazy" nothing; "random" some, at waits and now and then
    when work is queued; "eager" everything that can, half of the times that work is queued.
    """
    _loaded().late_set_mode(MODES.index(mode))


def counters() -> Counters:
    counted = Counters()
    _loaded().late_counters(ctypes.byref(counted))
    return counted


def at_once() -> dict[str, int]:
    """Return operator → calls that were not late, since the process began."""
    lines = _loaded().late_at_once().decode().splitlines()
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)}


def pending() -> int:
    """Return how much work is queued, on all streams."""
    return int(_loaded().late_pending())


def drain() -> None:
    """Run everything that is queued. Raises the first exception of queued work."""
    for index in range(module.DEVICES):
        torch.accelerator.synchronize(index)


def pin(address: int, nbytes: int) -> None:
    """Register host memory as pinned: copies to and from it are late if they are `non_blocking`."""
    _loaded().late_pin(address, nbytes)


def unpin(address: int) -> None:
    """Undo `pin`. Raises RuntimeError if a queued copy uses the memory."""
    if problem := _loaded().late_unpin(address):
        reason = "is not pinned" if problem == 2 else "is unpinned while queued copies use it"
        raise RuntimeError(f"Host memory at {address:#x} {reason}.")


@lru_cache
def available() -> bool:
    """Return whether the backend can be compiled and loaded here."""
    return compiler() is not None and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)

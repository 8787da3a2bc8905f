"""Collects the facts that `infinity report` shows about this installation and machine.

Each fact is queried from the module that uses it. A part that does not load is reported with the loader's error.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.cli.console import file_system, printable
from infinity.errors import InfinityError, StorageError
from infinity.sizes import format_size, show_bytes
from infinity.tiers.space import IN_MEMORY

Facts = dict[str, dict[str, Any]]
"""Section → name → value, of JSON types. A failed section, or a failed value, is a dict with the key "error"."""

_PACKAGES = ("numpy", "pydantic", "safetensors", "psutil", "typer", "rich")


def collect(paths: Sequence[Path] | None = None) -> Facts:
    """Return all sections, in the order in which they are shown.

    paths: folders that must work. By default the temporary folder and the current one, which may fail.
    """
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "infinity": _versions,
        "machine": _machine,
        "adam": _adam,
        "aio": _aio,
        "torch": _torch,
        "cuda": _cuda,
        "folders": lambda: _folders(paths),
    }
    return {name: _guarded(section) for name, section in sections.items()}


def broken(facts: Facts) -> bool:
    """Return True if a part that training needs does not work."""
    values = [value for section in facts.values() for value in (section, *section.values())]
    return any("error" in value for value in values if isinstance(value, dict))


def lines(facts: Facts) -> Iterator[str]:
    """Yield one unwrapped line for each fact, so that paths and errors can be copied."""
    for name, section in facts.items():
        for row, (key, value) in enumerate(section.items()):
            yield printable(f"{'' if row else name:<10}{key:<12} {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(each)}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _guarded(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return section()
    except Exception as error:  # noqa: BLE001 - the report shows any error
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        return {"error": " ← ".join(f"{type(e).__name__}: {e}" for e in chain)}


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"version": __version__, "folder": str(Path(__file__).parents[1])}
    versions["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions


def _machine() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available",
        "NUMA nodes": list(_nodes()),
        "pinnable": _memlock(),
    }


def _nodes(root: Path = Path("/")) -> Iterator[str]:
    """Yield the processors and the memory of each NUMA node, and the GPUs that are attached to it."""
    from infinity.tiers.available import gpu_nodes, numa_nodes

    gpus = gpu_nodes(os.environ, root)
    for node in numa_nodes(root):
        beside = [str(index) for index, where in enumerate(gpus) if where == node.number]
        attached = f" and GPU {' '.join(beside)}" if beside else ""
        listed = ["with processors", *_ranges(node.processors)] if node.processors else ["no processors"]
        yield f"{node.number} {' '.join(listed)}, {node.nbytes / 1e9:.1f} GB{attached}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ascending numbers as ranges, such as "0-3"."""
    for _, members in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        run = [number for _, number in members]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def processor() -> str:
    """Return the processor's name as Linux shows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memlock() -> str:
    """Return the limit of locked memory, which bounds pinned host memory and io_uring's registered buffers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    uring = "all" if soft == resource.RLIM_INFINITY or _may_lock_all() else f"{soft:,} bytes"
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else format_size(limit) for limit in (soft, hard)]
    return f"{shown[0]} (ulimit -l; at most {shown[1]}); io_uring can register {uring} of it for all threads together"


def _may_lock_all() -> bool:
    """Return True if the process has CAP_IPC_LOCK in the initial user namespace. The kernel then does not count
    io_uring's registered buffers against the limit."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        users = Path("/proc/self/uid_map").read_text(encoding="utf-8")
    except OSError:
        return False
    return users.split() == ["0", "0", "4294967295"] and any(
        line.startswith("CapEff:") and int(line[7:], 16) >> 14 & 1 for line in status.splitlines()
    )


def _adam() -> dict[str, Any]:
    native = importlib.import_module("infinity.native._adam")
    return {
        "in use": native.default_isa(),
        "available": native.available_isas(),
        "threads": native.default_threads(),
        "file": native.__file__,
    }


def _aio() -> dict[str, Any]:
    native = importlib.import_module("infinity.native._aio")
    from infinity.config import Aio
    from infinity.tiers.io import io_uring_state, open_engine

    aio = Aio()
    depth = {"block_size": aio.block_size, "queue_depth": aio.queue_depth, "threads": aio.threads}
    with open_engine(aio.engine, **depth) as engine:  # allocates the kernel's queues, as training does
        facts = {"in use": engine.backend, "queue_depth": f"{engine.queue_depth} granted"}
    try:
        open_engine("libaio", **depth).close()
        libaio = "usable"
    except StorageError as error:  # training uses io_uring then
        libaio = f"not usable: {error}"
    return facts | {
        "libaio": libaio,
        "io_uring": f"not usable: {reason}" if (reason := io_uring_state()) else "usable",
        "checksums": native.checksum_kind(),
        "available": native.backends(),
        "file": native.__file__,
    }


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backends: Mapping[str, Callable[[], bool]] = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    available = [name for name, is_available in backends.items() if dist.is_available() and is_available()]
    return {"version": torch.__version__, "threads": torch.get_num_threads(), "collectives": available}


def _cuda() -> dict[str, Any]:
    import torch

    kernels = {"own kernels": _cuda_kernels()}
    if torch.version.cuda is None:
        return {"state": "none: this torch is built without CUDA", **kernels}
    count = torch.cuda.device_count()
    if not count:
        return {"built for": torch.version.cuda, "state": f"none: {_why_no_cuda()}", **kernels}
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "built for": torch.version.cuda,
        "state": f"{count} device(s)",
        "devices": [f"{d.name}, {d.total_memory / 1e9:.1f} GB, sm_{d.major}{d.minor}" for d in devices],
        **kernels,
    }


def _cuda_kernels() -> str:
    """Return the toolkit and architectures of our CUDA kernels, or why they are missing and what replaces them."""
    from infinity.optim import cuda_adam

    reason = cuda_adam.why_not()
    instead = f"{reason}; torch's fused AdamW updates on CUDA devices" if reason else ""
    try:
        import infinity.native._adam_cuda as native
    except ImportError:
        return instead
    built = f"built by nvcc {native.TOOLKIT} for {', '.join(native.ARCHITECTURES)}"
    return f"{built}; not usable: {instead}" if reason else built


def _why_no_cuda() -> str:
    """Return CUDA's own error, which `torch.cuda.is_available()` hides."""
    import torch

    try:
        torch.empty(0, device="cuda")
    except Exception as error:  # noqa: BLE001 - shown
        return str(error).splitlines()[0]
    return "no device is visible"


def _folders(paths: Sequence[Path] | None) -> dict[str, Any]:
    shown = paths or dict.fromkeys(path.resolve() for path in (Path(tempfile.gettempdir()), Path.cwd()))
    return {str(path): _folder(path, needed=bool(paths)) for path in shown}


def _folder(path: Path, *, needed: bool) -> dict[str, Any]:
    """Return the properties of a swap file of one page in `path`. needed: report a failure as an error."""
    from infinity.tiers.files import open_swap_files

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the facts contain the same information
            with open_swap_files([path], 1, name="report") as swap:
                direct = swap.direct
        status, kind = os.statvfs(path), file_system(path)
        free = status.f_bavail * status.f_frsize
        return {
            "file system": kind,
            **({"note": "memory, not a drive"} if kind in IN_MEMORY else {}),
            "O_DIRECT": direct,
            "anonymous files": _anonymous(path),
            "free": f"{free / 1e9:.1f} GB" if free >= 1e9 else show_bytes(free),
        }
    except (OSError, InfinityError) as error:
        return {"error" if needed else "not usable": str(error).replace("(nvme_path)", "(--path)")}


def _anonymous(path: Path) -> bool:
    """Return True if the file system supports O_TMPFILE; otherwise swap files have a name for a moment."""
    try:
        os.close(os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True

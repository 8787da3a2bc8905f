"""What `infinity report` shows: facts about this installation and machine, each asked of whom it concerns.

A part that does not load is reported with the error of the loader, not with a guess about it.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.sizes import format_size

Facts = dict[str, dict[str, Any]]
"""Section → name → value, of JSON types. A section that failed has the key "error"."""

_PACKAGES = ("numpy", "pydantic", "safetensors", "psutil", "typer", "rich")


def collect() -> Facts:
    """All sections, in the order in which they are shown."""
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "infinity": _versions,
        "machine": _machine,
        "adam": _adam,
        "aio": _aio,
        "torch": _torch,
        "cuda": _cuda,
    }
    return {name: _guarded(section) for name, section in sections.items()}


def broken(facts: Facts) -> bool:
    """Whether a part that training needs does not work."""
    return any("error" in section for section in facts.values())


def lines(facts: Facts) -> Iterator[str]:
    """`facts` for people: a line for each, never wrapped, so that paths and errors can be copied whole."""
    for name, section in facts.items():
        for row, (key, value) in enumerate(section.items()):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{'' if row else name:<10}{key:<13}{text}"


def _guarded(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return section()
    except Exception as error:  # noqa: BLE001 - whatever it is, this command is there to show it
        return {"error": " ← ".join(f"{type(e).__name__}: {e}" for e in _chain(error))}


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"version": __version__, "folder": str(Path(__file__).parents[1])}
    found["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _machine() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available",
        "pinnable": _memlock(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memlock() -> str:
    """How much memory this process may lock: the limit under which host memory is pinned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else format_size(limit) for limit in (soft, hard)]
    return f"{shown[0]} (ulimit -l; at most {shown[1]})"


def _adam() -> dict[str, Any]:
    native = importlib.import_module("infinity._adam")
    return {
        "in use": native.default_isa(),
        "available": native.available_isas(),
        "threads": native.default_threads(),
        "file": native.__file__,
    }


def _aio() -> dict[str, Any]:
    native = importlib.import_module("infinity._aio")
    with native.Engine() as engine:  # asks the kernel for its queues, as training does
        return {
            "in use": engine.backend,
            "available": native.backends(),
            "queue_depth": f"{engine.queue_depth} granted",
            "file": native.__file__,
        }


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backends: Mapping[str, Callable[[], bool]] = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    found = [name for name, there in backends.items() if dist.is_available() and there()]
    return {"version": torch.__version__, "threads": torch.get_num_threads(), "collectives": found}


def _cuda() -> dict[str, Any]:
    import torch

    if torch.version.cuda is None:
        return {"state": "none: this torch is built without CUDA"}
    count = torch.cuda.device_count()
    if not count:
        return {"built for": torch.version.cuda, "state": f"none: {_why_no_cuda()}"}
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "built for": torch.version.cuda,
        "state": f"{count} device(s)",
        "devices": [f"{d.name}, {d.total_memory / 1e9:.1f} GB, sm_{d.major}{d.minor}" for d in devices],
    }


def _why_no_cuda() -> str:
    """What CUDA itself says; `torch.cuda.is_available()` hides it."""
    import torch

    try:
        torch.empty(0, device="cuda")
    except Exception as error:  # noqa: BLE001 - shown
        return str(error).splitlines()[0]
    return "no device is visible"

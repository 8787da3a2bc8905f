"""Facts of a machine with a device: memory before and after it is used, cores, NUMA nodes, PCIe link, disks, versions.

    python bench/gpu_facts.py --touch 110GiB --nvme-path /mnt/nvme --output facts.json

`--touch` writes to that much memory, and prints MemTotal and MemAvailable meanwhile: the memory of a virtual machine
may grow as it is used. It runs in a process of its own, which the kernel ends first if memory is short. A fact that
cannot be read is null.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GIB = 1 << 30
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "pydantic",
    "psutil",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "infinity-engine",
)
GPU = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "compute_cap",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks.sm",
    "clocks.max.sm",
    "power.limit",
)


def meminfo() -> dict[str, float]:
    """Return MemTotal, MemFree and MemAvailable in GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: round(int(lines[name].split()[0]) / 2**20, 1) for name in ("MemTotal", "MemFree", "MemAvailable")}


def touched(nbytes: int, step: int = 8 * GIB) -> Iterator[dict[str, Any]]:
    """Write to `nbytes` of memory on all cores. Yields the memory and the rate after each `step` bytes."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as the engine's buffers
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    workers = len(os.sched_getaffinity(0))
    for start in range(0, nbytes, step):
        length = min(step, nbytes - start)
        share = -(-length // workers)
        began = time.perf_counter()
        threads = [
            threading.Thread(target=ctypes.memset, args=(first + start + k, 1, min(share, length - k)))
            for k in range(0, length, share)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = length / (time.perf_counter() - began) / 1e9
        yield {"touched": round((start + length) / GIB, 1), "GB/s": round(rate, 1), **meminfo()}


def touch_apart(nbytes: int) -> Iterator[dict[str, Any]]:
    """Yield what `touched` yields in a process of its own, until that ends or is killed."""
    command = [sys.executable, __file__, "--touch-here", str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        yield {"ended with status": process.returncode}


def facts(nvme_path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield name and reader of each fact."""
    yield "kernel", platform.release
    yield "python", platform.python_version
    yield "glibc", lambda: "".join(platform.libc_ver())
    yield "packages", lambda: dict(_versions())
    yield "cores", lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "processor", lambda: _lines("lscpu", "Model name", "Thread", "Socket", "L2", "L3", "Hypervisor", "Flags")
    yield "numa", lambda: {node.name: (node / "cpulist").read_text().strip() for node in _nodes()}
    yield "huge pages", lambda: _text("/sys/kernel/mm/transparent_hugepage/enabled")
    yield "huge page defrag", lambda: _text("/sys/kernel/mm/transparent_hugepage/defrag")
    yield "overcommit", lambda: _text("/proc/sys/vm/overcommit_memory")
    yield "locked memory", lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "cgroup memory", lambda: _text("/sys/fs/cgroup/memory.max")
    yield "shared memory", lambda: f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB"
    yield "gpu", _gpu
    yield "gpu topology", lambda: _run("nvidia-smi", "topo", "-m")
    yield "nvcc", lambda: _run("nvcc", "--version").splitlines()[-1]
    yield "nvme folder", lambda: _disk(nvme_path)
    yield "compilers", lambda: _run("c++", "--version").splitlines()[0]


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


def _text(path: str) -> str:
    return Path(path).read_text().strip()


def _nodes() -> list[Path]:
    return sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _lines(command: str, *beginnings: str) -> list[str]:
    found = [" ".join(line.split()) for line in _run(command).splitlines() if line.strip().startswith(beginnings)]
    vectors = {"avx2", "avx512f", "avx512_bf16", "amx_tile"}
    return [
        f"Flags: {' '.join(sorted(vectors & set(line.split())))}" if line.startswith("Flags") else line
        for line in found
    ]


def _gpu() -> dict[str, str]:
    values = _run("nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader").splitlines()[0].split(", ")
    return dict(zip(GPU, values, strict=True))


def _disk(path: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    mount = _run("df", "--output=source,fstype", str(path)).splitlines()[-1].split()
    return {"source": mount[0], "type": mount[-1], "free GB": usage.free // 10**9, "GB": usage.total // 10**9}


def read_all(nvme_path: Path) -> dict[str, Any]:
    """Return all facts that can be read; the others are None."""
    found: dict[str, Any] = {}
    for name, read in facts(nvme_path):
        try:
            found[name] = read()
        except (OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError):
            found[name] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--touch", default="0", metavar="SIZE", help="memory to write to, such as 110GiB (none)")
    parser.add_argument("--touch-here", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    parser.add_argument("--nvme-path", type=Path, default=Path("/tmp"), help="folder for states (/tmp)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")
    args = parser.parse_args()
    if args.touch_here is not None:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel ends this process first
        for one in touched(args.touch_here):
            print(json.dumps(one), flush=True)
        return
    result = {"bench": "gpu_facts", "memory": [meminfo()], **read_all(args.nvme_path)}
    print(json.dumps(result, indent=1), flush=True)
    _write(args.output, result)
    nbytes = int(float(args.touch.removesuffix("GiB")) * GIB)
    if nbytes:
        for one in touch_apart(nbytes):
            print(f"  {one}", flush=True)
            result["memory"].append(one)
            _write(args.output, result)  # it may be stopped
        result["memory"].append(meminfo())
        print(f"  afterwards {result['memory'][-1]}", flush=True)
        _write(args.output, result)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

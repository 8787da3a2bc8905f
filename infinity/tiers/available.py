"""Host memory, caches, NUMA nodes and processors available to this process.

Memory: the machine's free memory, or less under the limit of a container or of `ulimit -v` or `-d`.
`INFINITY_MACHINE_MEMORY` gives the size of a virtual machine whose memory grows as it is used.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.errors import ConfigError
from infinity.inputs import number_of
from infinity.sizes import parse_size


def available_memory(root: str | Path = "/") -> int:
    """Return the available bytes. root: parent folder of /proc and /sys/fs/cgroup.

    psutil reports the machine only; a container that exceeds its control group's limit is killed without a message.
    Raises ConfigError if `INFINITY_MACHINE_MEMORY` is not a size.
    """
    return max(0, _least(root)[0])


def memory_limit(root: str | Path = "/") -> tuple[str, int]:
    """Return the name of the limit that bounds `available_memory`, such as "ulimit -d", and the bytes by which this
    process exceeds it. An empty name: the machine's memory.
    """
    left, name = _least(root)
    return name, max(0, -left)


def _least(root: str | Path) -> tuple[int, str]:
    """Return (the bytes that the tightest limit leaves, its name). Negative: the process exceeds it."""
    groups = ((left, "the container's limit") for left in _left_by_limits(Path(root)))
    ulimits = ((limit - used, name) for limit, used, name in _ulimits(Path(root)))
    found = [(_left_by_machine(), ""), *groups, *ulimits]
    return min(found, key=lambda each: each[0])


def total_memory(root: str | Path = "/") -> int:
    """Return the bytes of the machine, or of the smallest limit on this process: of a control group or `ulimit -d`."""
    # Limits nest, and the smallest one holds. `ulimit -v` counts addresses, most of which take no memory.
    limits = (_number(folder / limit_name) for folder, limit_name, _ in _groups(Path(root)))
    private = (limit for limit, _, name in _ulimits(Path(root)) if name == "ulimit -d")
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None), *private])


MACHINE_MEMORY = "INFINITY_MACHINE_MEMORY"
"""Variable with the size that the machine's memory can reach, such as "120GiB", where Linux reports less."""


def _left_by_machine() -> int:
    memory = psutil.virtual_memory()
    given = os.environ.get(MACHINE_MEMORY)
    if given is None:
        return int(memory.available)
    try:
        total = parse_size(given)
    except ValueError as error:
        raise ConfigError(f"{MACHINE_MEMORY}: {error}.") from None
    return max(0, total - int(memory.total - memory.available))


def _left_by_limits(root: Path) -> Iterator[int]:
    """Yield the bytes left by each limit on this process's control group and its ancestors. Page cache is free."""
    for folder, limit_name, usage_name in _groups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        # Each ancestor's limit holds, too, so all groups are read and the least is taken.
        if limit is not None and usage is not None:
            yield limit - usage + _cache(folder / "memory.stat", root)


_ARENA = 64 << 20
"""Addresses that glibc reserves for each thread that allocates."""
_DEFAULT_STACK = 2 << 20
"""Bytes of a thread's stack where `ulimit -s` is unlimited, by glibc on x86-64."""
_THREADS = 8
"""Threads of a process that trains, beside those that share the work of an operator."""


def _ulimits(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (bytes without the stacks of threads that training will start, bytes in use, name) of `ulimit -v` and `-d`.

    Both count a stack when its thread starts; the memory of a machine or a container, as it is used.
    """
    addresses, private, stack = (
        resource.getrlimit(key)[0] for key in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK)
    )
    if addresses == private == resource.RLIM_INFINITY:
        return
    status = dict(line.split(":", 1) for line in (root / "proc/self/status").read_text().splitlines())
    # The native update and torch's operators have a thread for each processor but one.
    threads = _THREADS + 2 * (len(os.sched_getaffinity(0)) - 1) - int(status["Threads"])
    each = _DEFAULT_STACK if stack == resource.RLIM_INFINITY else stack
    kinds = (addresses, "VmSize", each + _ARENA, "ulimit -v"), (private, "VmData", each, "ulimit -d")
    for limit, field, nbytes, name in kinds:
        if limit != resource.RLIM_INFINITY:
            used = int(status[field].removesuffix("kB")) << 10
            yield limit - max(0, threads) * nbytes, used, name


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, name of the limit file, name of the usage file) of each group, for cgroup versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's, which is not mounted; the container's own group is the top.
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield top / part, *names


def _number(path: Path) -> int | None:
    """Return the number in the file; None without a file, or for "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cache(stat: Path, root: Path) -> int:
    """Return the bytes of file pages that the kernel reclaims when memory is short.

    Those that this process maps, such as its libraries, are active and not counted.
    """
    try:
        found = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    inactive, active = (
        int(found.get(f"total_{kind}_file", found.get(f"{kind}_file", 0))) for kind in ("inactive", "active")
    )
    # Pages of libraries are active, and would be read again at once.
    try:
        mapped = int((root / "proc/self/statm").read_text().split()[2]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        mapped = active
    return inactive + max(0, active - mapped)


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of all processors' caches of the last level; 0 if Linux does not list them."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in root.glob("cpu[0-9]*/cache/index*"):
        try:
            level, sharers, size = (
                (folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            sizes[int(level), sharers] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


FEEDING = 3
"""Processors left to the threads that feed an accelerator: the model's, autograd's, and one of the engine's."""


def update_processors(*, feeding: bool) -> int:
    """Return the number of processors for this rank's update; 0: all that the process may use.

    Ranks of one machine that share its processors (`LOCAL_WORLD_SIZE` of torchrun) get equal parts. A rank that was
    bound to some of them has these to itself. feeding: leave `FEEDING` to threads that feed an accelerator.
    """
    own, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    # Fewer processors than the machine has: a launcher or a container has divided them already.
    ranks = number_of("LOCAL_WORLD_SIZE", 1, least=1) if own == present else 1
    if ranks == 1 and not feeding:
        return 0
    return max(1, own // ranks - (FEEDING if feeding else 0))


@dataclass(frozen=True)
class Node:
    """A NUMA node: number, processors, and bytes of its memory."""

    number: int
    processors: tuple[int, ...]
    nbytes: int


def numa_nodes(root: Path = Path("/")) -> list[Node]:
    """Return the NUMA nodes, ascending; none if Linux does not list them. root: parent folder of /sys."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            processors = parse_processors((folder / "cpulist").read_text())
            memory = next(line.split() for line in (folder / "meminfo").read_text().splitlines() if "MemTotal" in line)
            nodes.append(Node(int(folder.name.removeprefix("node")), processors, int(memory[3]) << 10))
        except (OSError, ValueError, StopIteration, IndexError):
            continue
    return sorted(nodes, key=lambda node: node.number)


def gpu_nodes(environ: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Return the NUMA node of each visible NVIDIA GPU, -1 if it is unknown; empty without GPUs.

    GPUs are numbered by PCI address, as CUDA numbers equal ones. environ: with CUDA_VISIBLE_DEVICES, whose numbers or
    UUIDs select them. root: parent folder of /proc and /sys.
    """
    present: list[tuple[str, int]] = []  # UUID, node
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*:*")):
        node = _number(root / "sys/bus/pci/devices" / folder.name / "numa_node")
        try:
            lines = (folder / "information").read_text().splitlines()
        except OSError:
            lines = []
        uuids = (line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID"))
        present.append((next(uuids, ""), -1 if node is None else node))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [node for _, node in present]
    nodes = []
    for name in visible.split(",") if visible else []:
        if name.isdecimal():
            found = [node for _, node in present[int(name) : int(name) + 1]]
        else:
            found = [node for uuid, node in present if uuid.startswith(name)]
        nodes.append(found[0] if len(found) == 1 else -1)
    return nodes


def parse_processors(text: str) -> tuple[int, ...]:
    """Return the processors of a list such as "0,2-4", ascending. Raises ValueError for another text."""
    found: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or (found and numbers[0] <= found[-1]):
            raise ValueError(f"{text.strip()!r} is no ascending list of processors such as 0,2-4")
        found += numbers
    return tuple(found)


def processors_of_rank(
    rank: int, ranks: int, processors: Sequence[int], nodes: Sequence[Node], gpus: Sequence[int]
) -> list[int]:
    """Return the processors of one of the ranks of a machine: an equal part of `processors`, in their order.

    gpus: node of each rank's GPU. If all have processors for their ranks, these ranks divide those of their node.
    """
    here = {node.number: [each for each in processors if each in node.processors] for node in nodes}
    own = list(gpus[:ranks])
    if len(own) == ranks and all(len(here.get(node, ())) >= own.count(node) for node in own):
        processors, rank, ranks = here[own[rank]], own[:rank].count(own[rank]), own.count(own[rank])
    each = len(processors) // ranks
    if not each:
        raise ConfigError(f"{len(processors)} processors are too few for {ranks} ranks: start fewer, or bind none")
    return list(processors[rank * each : (rank + 1) * each])


def bind_rank(listed: str, environ: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Bind this process, and programs that it executes, to the processors of its rank, and return them.

    Memory follows, since Linux places a page on the node of the thread that first writes to it. listed: processors for
    all ranks of the machine; empty: one of each core that this process may use, near the ranks' GPUs. environ: with
    torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    allowed = os.sched_getaffinity(0)
    rank, ranks = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
    if listed:
        try:
            processors: Sequence[int] = parse_processors(listed)
        except ValueError as error:
            raise ConfigError(f"--bind_core_list: {error}") from None
        if missing := sorted(set(processors) - allowed):
            raise ConfigError(
                f"--bind_core_list has the processors {missing}, which this process may not use: choose among "
                f"{sorted(allowed)}"
            )
        gpus: list[int] = []
    else:
        processors, gpus = list(_first_of_cores(allowed, root)), gpu_nodes(environ, root)
    found = processors_of_rank(rank, ranks, processors, numa_nodes(root), gpus)
    os.sched_setaffinity(0, found)
    return found


def _first_of_cores(allowed: Collection[int], root: Path) -> Iterator[int]:
    """Yield one processor of each core: two threads of a core share its bandwidth."""
    for processor in sorted(allowed):
        file = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        try:
            siblings = parse_processors(file.read_text())
        except (OSError, ValueError):
            siblings = ()
        if all(other >= processor for other in siblings if other in allowed):
            yield processor

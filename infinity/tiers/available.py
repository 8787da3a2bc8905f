"""Host memory, caches and processors available to this process.

Memory: the machine's free memory, or less under the limit of a container or of `ulimit -v`. `INFINITY_MACHINE_MEMORY`
gives the size of a virtual machine whose memory grows as it is used.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
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
    return min([_left_by_machine(), *_left_by_limits(Path(root)), *_left_by_addresses(Path(root))])


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
            yield max(0, limit - usage + _cache(folder / "memory.stat"))


def _left_by_addresses(root: Path) -> Iterator[int]:
    """Yield the bytes that this process may still map, if that is limited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        # RLIMIT_AS bounds mapped addresses and not resident pages; they are the first field.
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * resource.getpagesize())


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


def _cache(stat: Path) -> int:
    """Return the bytes of file pages that the kernel reclaims when memory is short."""
    try:
        found = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


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

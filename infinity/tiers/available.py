"""How much host memory this process may still take: the machine's, or what a container's limit leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def available_memory(root: str | Path = "/") -> int:
    """Bytes. `root`: where /proc and /sys/fs/cgroup are looked for.

    psutil knows the machine only; a container that exceeds its control group's limit is killed without a word.
    """
    return min([int(psutil.virtual_memory().available), *_left_by_limits(Path(root))])


def _left_by_limits(root: Path) -> Iterator[int]:
    """What each limit on this process's control group and the groups around it leaves; page cache counts as free."""
    for folder, limit_name, usage_name in _groups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            yield max(0, limit - usage + _cache(folder / "memory.stat"))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folders of the groups, and what the files for limit and usage are called there (versions 2 and 1)."""
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
        # In a container the path may be that of the host, which is not mounted; the container's own group is the top.
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield top / part, *names


def _number(path: Path) -> int | None:
    """The number in the file; None without a file, and for "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cache(stat: Path) -> int:
    """Bytes of file pages that the kernel takes back when memory is short."""
    try:
        found = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))

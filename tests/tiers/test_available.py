"""Memory available to a process: the machine's, or what its control groups' limits leave."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infinity.errors import ConfigError
from infinity.tiers.available import available_memory, update_processors


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_control_groups(tmp_path: Path) -> None:
    assert abs(available_memory(tmp_path) - psutil.virtual_memory().available) < 1 << 30


def test_a_machine_that_grows_is_as_large_as_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports the memory that a virtual machine has at present. Limits of control groups still count."""
    now = SimpleNamespace(total=4 << 30, available=3 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    assert available_memory(tmp_path) == 3 << 30
    monkeypatch.setenv("INFINITY_MACHINE_MEMORY", "120GiB")
    assert available_memory(tmp_path) == 119 << 30
    now.total, now.available = 90 << 30, 1 << 30  # it has grown, and 89 GiB are in use
    assert available_memory(tmp_path) == 31 << 30
    group(tmp_path / "proc/self", {"cgroup": "0::/a\n"})
    group(tmp_path / "sys/fs/cgroup/a", {"memory.max": "1000\n", "memory.current": "100\n"})
    assert available_memory(tmp_path) == 900


def test_a_size_of_the_machine_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_MACHINE_MEMORY", "much")
    with pytest.raises(ConfigError, match="INFINITY_MACHINE_MEMORY: 'much' is not a size; write bytes as a number"):
        available_memory(tmp_path)


def test_version_2(tmp_path: Path) -> None:
    """The tightest limit up the tree counts; file pages that can be dropped count as free."""
    group(tmp_path / "proc/self", {"cgroup": "0::/a/b\n"})
    top = tmp_path / "sys/fs/cgroup"
    group(top / "a/b", {"memory.max": "max\n", "memory.current": "900\n"})
    stat = "anon 500\ninactive_file 300\nactive_file 100\n"
    group(top / "a", {"memory.max": "1000\n", "memory.current": "950\n", "memory.stat": stat})
    assert available_memory(tmp_path) == 350


def test_version_1(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", {"cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"})
    files = {
        "memory.limit_in_bytes": "2000\n",
        "memory.usage_in_bytes": "500\n",
        "memory.stat": "total_inactive_file 7\n",
    }
    group(tmp_path / "sys/fs/cgroup/memory/x", files)
    assert available_memory(tmp_path) == 1507


def test_a_limit_of_addresses(tmp_path: Path) -> None:
    """That of `ulimit -v`, of which all but 5 pages are taken."""
    before, page = resource.getrlimit(resource.RLIMIT_AS), resource.getpagesize()
    group(tmp_path / "proc/self", {"statm": f"{(1 << 40) // page - 5} 2 1 0 0 0 0"})
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        assert available_memory(tmp_path) == 5 * page
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_group_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """In a container the group's own files are at the top of what is mounted."""
    group(tmp_path / "proc/self", {"cgroup": "0::/docker/0123\n"})
    group(tmp_path / "sys/fs/cgroup", {"memory.max": "4096\n", "memory.current": "8192\n"})
    assert available_memory(tmp_path) == 0


@pytest.mark.parametrize(
    ("bound", "ranks", "feeding", "expected"),
    [
        (16, 1, False, 0),
        (16, 1, True, 13),
        (16, 4, False, 4),
        (16, 4, True, 1),
        (4, 4, False, 0),  # bound to its part of the machine
        (4, 4, True, 1),
        (2, 1, True, 1),
    ],
)
def test_ranks_share_processors_and_leave_some_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch, bound: int, ranks: int, feeding: bool, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(bound)))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert update_processors(feeding=feeding) == expected

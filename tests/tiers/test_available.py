"""Memory available to a process: the machine's, or what its control groups' limits leave."""

from __future__ import annotations

from pathlib import Path

import psutil

from infinity.tiers.available import available_memory


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_control_groups(tmp_path: Path) -> None:
    assert abs(available_memory(tmp_path) - psutil.virtual_memory().available) < 1 << 30


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


def test_a_group_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """In a container the group's own files are at the top of what is mounted."""
    group(tmp_path / "proc/self", {"cgroup": "0::/docker/0123\n"})
    group(tmp_path / "sys/fs/cgroup", {"memory.max": "4096\n", "memory.current": "8192\n"})
    assert available_memory(tmp_path) == 0

"""Memory available to a process: the machine's, or what its control groups' limits leave."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infinity.errors import ConfigError
from infinity.tiers.available import (
    Node,
    available_memory,
    bind_rank,
    gpu_nodes,
    memory_limit,
    numa_nodes,
    parse_processors,
    processors_of_rank,
    total_memory,
    update_processors,
)


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
    assert total_memory(tmp_path) == 1000


def test_active_file_pages_count_unless_this_process_maps_them(tmp_path: Path) -> None:
    """The kernel reclaims them as well, such as a file that was read twice; libraries are mapped."""
    page = resource.getpagesize()
    group(tmp_path / "proc/self", {"cgroup": "0::/a\n", "statm": "9 8 3 0 0 0 0\n"})
    stat = f"inactive_file {page}\nactive_file {5 * page}\n"
    limits = {"memory.max": f"{100 * page}\n", "memory.current": f"{90 * page}\n", "memory.stat": stat}
    group(tmp_path / "sys/fs/cgroup/a", limits)
    assert available_memory(tmp_path) == (10 + 1 + 2) * page


def test_version_1(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", {"cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"})
    files = {
        "memory.limit_in_bytes": "2000\n",
        "memory.usage_in_bytes": "500\n",
        "memory.stat": "total_inactive_file 7\n",
    }
    group(tmp_path / "sys/fs/cgroup/memory/x", files)
    assert available_memory(tmp_path) == 1507


@pytest.mark.parametrize(
    ("limit", "left", "of_a_thread"),
    [(resource.RLIMIT_AS, 5 << 10, (8 + 64) << 20), (resource.RLIMIT_DATA, 7 << 10, 8 << 20)],
    ids=["-v", "-d"],
)
def test_a_ulimit(limit: int, left: int, of_a_thread: int, tmp_path: Path) -> None:
    """A thread's stack counts as addresses and as private memory when it starts; its arena, as addresses."""
    taken, threads = 1 << 40, 8 + 2 * (len(os.sched_getaffinity(0)) - 1)
    before, stack = resource.getrlimit(limit), resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(limit, (taken + left + 3 * of_a_thread, before[1]))
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, stack[1]))
    try:
        for started, expected in ((threads + 2, left + 3 * of_a_thread), (threads - 3, left)):
            status = (
                f"Name:\tpython: VmData:\nVmSize:\t{taken >> 10} kB\nVmData:\t{taken >> 10} kB\nThreads:\t{started}\n"
            )
            group(tmp_path / "proc/self", {"status": status})
            assert available_memory(tmp_path) == expected
            assert memory_limit(tmp_path) == ("ulimit -v" if limit == resource.RLIMIT_AS else "ulimit -d", 0)
    finally:
        resource.setrlimit(limit, before)
        resource.setrlimit(resource.RLIMIT_STACK, stack)


def test_a_group_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """In a container the group's own files are at the top of what is mounted."""
    group(tmp_path / "proc/self", {"cgroup": "0::/docker/0123\n"})
    group(tmp_path / "sys/fs/cgroup", {"memory.max": "4096\n", "memory.current": "8192\n"})
    assert available_memory(tmp_path) == 0 and memory_limit(tmp_path) == ("the container's limit", 4096)


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


UUID = "GPU-{}0000000-0000-0000-0000-000000000000"


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of 4 cores with two threads each, and four GPUs, of which the first two are on node 1."""
    for node in (0, 1):
        first = 4 * node
        files = {
            "cpulist": f"{first}-{first + 3},{first + 8}-{first + 11}\n",
            "meminfo": f"Node {node} MemTotal: 1024 kB\n",
        }
        group(tmp_path / f"sys/devices/system/node/node{node}", files)
    for processor in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology"
        group(folder, {"thread_siblings_list": f"{processor % 8},{processor % 8 + 8}\n"})
    for number, node in enumerate((1, 1, 0, 0)):
        address = f"0000:{number}a:00.0"
        group(tmp_path / f"sys/bus/pci/devices/{address}", {"numa_node": f"{node}\n"})
        group(tmp_path / f"proc/driver/nvidia/gpus/{address}", {"information": f"GPU UUID: \t {UUID.format(number)}\n"})
    return tmp_path


def test_numa_nodes_and_their_gpus(two_nodes: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    assert numa_nodes(two_nodes) == [Node(0, first, 1 << 20), Node(1, second, 1 << 20)]
    assert gpu_nodes({}, two_nodes) == [1, 1, 0, 0]
    for visible, nodes in {"2,0": [0, 1], f"{UUID.format(3)},GPU-1": [0, 1], "": [], "MIG-1,9": [-1, -1]}.items():
        assert gpu_nodes({"CUDA_VISIBLE_DEVICES": visible}, two_nodes) == nodes
    bare = tmp_path_factory.mktemp("bare")
    assert numa_nodes(bare) == [] and gpu_nodes({}, bare) == []


def test_this_machines_nodes_have_its_processors() -> None:
    assert {each for node in numa_nodes() for each in node.processors} >= os.sched_getaffinity(0) or not numa_nodes()


def test_lists_of_processors() -> None:
    assert parse_processors("0,2-4,8\n") == (0, 2, 3, 4, 8) and parse_processors("\n") == ()
    for wrong in ("3,1", "0-2,2", "4-2", "a", "0,,1", "-1"):
        with pytest.raises(ValueError):
            parse_processors(wrong)


NODES = [Node(0, (0, 1, 2, 3), 0), Node(1, (4, 5, 6, 7), 0)]


@pytest.mark.parametrize(
    ("ranks", "processors", "gpus", "expected"),
    [
        (1, range(8), [], ["01234567"]),
        (2, range(8), [], ["0123", "4567"]),
        (3, range(8), [], ["01", "23", "45"]),
        (2, range(8), [1, 0], ["4567", "0123"]),
        (4, range(8), [1, 1, 0, 0], ["45", "67", "01", "23"]),
        (3, range(8), [1, 0, 1], ["45", "0123", "67"]),
        (2, range(8), [1, -1], ["0123", "4567"]),  # a node is unknown
        (2, range(8), [1], ["0123", "4567"]),  # more ranks than GPUs
        (2, range(4), [1, 0], ["01", "23"]),  # this process may not use node 1
    ],
)
def test_ranks_divide_the_processors_of_their_gpus_nodes(
    ranks: int, processors: range, gpus: list[int], expected: list[str]
) -> None:
    found = [processors_of_rank(rank, ranks, processors, NODES, gpus) for rank in range(ranks)]
    assert found == [[int(digit) for digit in each] for each in expected]


def test_a_rank_without_a_processor_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 processors are too few for 3 ranks: start fewer"):
        processors_of_rank(0, 3, range(2), NODES, [])


@pytest.mark.parametrize(
    ("listed", "environ", "expected"),
    [
        ("", {"CUDA_VISIBLE_DEVICES": ""}, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("", {"CUDA_VISIBLE_DEVICES": "0,2"}, [{4, 5, 6, 7}, {0, 1, 2, 3}]),
        ("", {}, [{4, 5}, {6, 7}]),  # both GPUs are on node 1
        ("1,9,11-12", {}, [{1, 9}, {11, 12}]),
    ],
)
def test_a_rank_is_bound_to_one_processor_of_each_core(
    listed: str, environ: dict[str, str], expected: list[set[int]], two_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr("os.sched_setaffinity", lambda process, processors: bound.append(set(processors)))
    for rank in range(2):
        bind_rank(listed, {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", **environ}, two_nodes)
    assert bound == expected
    with pytest.raises(ConfigError, match=r"--bind_core_list has the processors \[16\], which .* choose among \[0, 1"):
        bind_rank("15-16", environ, two_nodes)
    with pytest.raises(ConfigError, match="--bind_core_list: '2,1' is no ascending list"):
        bind_rank("2,1", environ, two_nodes)

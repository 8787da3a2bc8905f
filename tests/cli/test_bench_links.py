"""`infinity bench-links`: its JSON and table, rates of small work, several ranks, refused options, leftovers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.cli.console import write_output
from infinity.cli.drive.measure import Bench
from infinity.cli.links import bench as command, rates
from infinity.cli.links.bench import COMPILER, ProcessMemory, process_memory
from infinity.cli.links.rates import FEWEST_ROUNDS, ROUNDS, Calls, Copies, Gathers, adam, matmul, measure, unsteady
from infinity.errors import InfinityError, RanksError
from infinity.sim.machine import BANDWIDTHS, DTYPES, Links
from infinity.tiers.available import cache_bytes
from infinity.tiers.device import CpuDevice
from support.commands import refused, run
from support.late_device import LateDevice, Reached
from support.ranks import Group

QUICK = ["--size", "16MiB", "--seconds", "0.1"]
ON_DRIVE = ("nvme_read", "nvme_write", "nvme_mixed", "memory")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with little memory, narrow matmuls and without a new process."""
    monkeypatch.setattr(rates, "_LEAST_STATES", 1 << 20)
    monkeypatch.setattr(rates, "cache_bytes", lambda: 0)
    monkeypatch.setattr(rates, "WIDTHS", (16,))
    monkeypatch.setattr(command, "process_memory", lambda *_: ProcessMemory(123_456_789, of_files=0))


def without_notes(text: str) -> list[str]:
    """The lines of `text`, without the note that the machine is busy."""
    return [line for line in text.splitlines() if not line.startswith("note: ") or "between rounds" not in line]


@pytest.mark.usefixtures("small")
def test_the_json_is_what_links_reads(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    result = run("bench-links", "--path", folder, *QUICK, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout == out.read_text() and without_notes(result.stderr) == [f"written to {out}"]
    links = Links.from_json(out.read_text())
    assert all(getattr(links, name) > 0 for name in ON_DRIVE)
    assert all(getattr(links, name) is None for name in BANDWIDTHS if name not in ON_DRIVE)
    assert list(links.flops) == list(DTYPES) and all(rate is not None and rate > 0 for rate in links.flops.values())
    assert list(links.weights) == list(DTYPES) and all(rate is not None and rate > 0 for rate in links.weights.values())
    assert links.baseline_rss == 123_456_789
    machine, measurement = links.facts["machine"], links.facts["measurement"]
    assert machine["torch"] == torch.__version__ and machine["device"] == "cpu" and machine["ranks"] == 1
    assert list(machine["folders"]) == [str(folder)] and machine["file"] == 16 << 20
    assert measurement["rounds"] == FEWEST_ROUNDS
    for name in ON_DRIVE:
        assert 0 < measurement["lowest"][name] <= getattr(links, name) <= measurement["highest"][name]
    assert set(os.listdir(tmp_path)) == {"links.json", "drive"}


@pytest.mark.usefixtures("small")
def test_the_table_names_every_rate_and_absent_hardware(folder: Path) -> None:
    result = run("bench-links", "--path", folder, *QUICK)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name in ON_DRIVE:
        assert "B/s" in lines[name] and " to " in lines[name]
    assert "–" in lines["host_to_device"] and "no accelerator" in lines["device_to_host"]
    assert "one rank" in lines["collective"] and "FLOP/s" in lines["flops.bfloat16"]
    assert "123 MB" in lines["baseline_rss"] and "direct" in lines["drive:"] and "…" not in result.stdout
    stages = ["starting a process that imports torch", "laying out 16MiB", "preparing memory and matmuls"]
    assert without_notes(result.stderr) == [*stages, "measuring", "verifying"]


@pytest.mark.usefixtures("small")
def test_a_drive_that_is_memory_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.cli.console.file_system", lambda path: "tmpfs")
    result = run("bench-links", "--path", folder, *QUICK, "--json")
    assert result.exit_code == 0 and f"note: {folder} is on tmpfs, which is memory" in result.stderr


def test_bad_options_are_refused(folder: Path, tmp_path: Path) -> None:
    bench = ("bench-links", "--path", folder)
    refused(2, "--seconds must be between", *bench, "--seconds", "0")
    refused(2, "--size must be at least 16MiB, not 1MiB", *bench, "--size", "1MiB")
    refused(2, "--size: 'big' is not a size", *bench, "--size", "big")
    refused(2, "none does not exist: pass a folder", "bench-links", "--path", tmp_path / "none")
    refused(2, "--out", *bench, "--out", tmp_path / "none" / "links.json")


@pytest.mark.usefixtures("small")
def test_a_drive_that_is_too_small_is_one_line(folder: Path) -> None:
    refused(1, "too little space in", "bench-links", "--path", folder, "--size", "1PiB")


@pytest.mark.usefixtures("small")
def test_an_interrupt_is_one_line_and_writes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupt)
    out = tmp_path / "links.json"
    refused(130, "interrupted; nothing is left", "bench-links", "--path", folder, *QUICK, "--out", out)
    assert not out.exists()


@pytest.mark.usefixtures("small")
def test_a_result_that_cannot_be_written_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    out = tmp_path / "links.json"
    out.write_text("before")
    result = run("bench-links", "--path", folder, *QUICK, "--out", out)
    assert result.exit_code == 1 and "nvme_mixed" in result.stdout
    assert result.stderr.splitlines()[-1] == f"infinity: --out {out} was not written: No space left on device"
    assert out.read_text() == "before" and set(os.listdir(tmp_path)) == {"links.json", "drive"}


def test_an_output_is_replaced_through_links_and_devices_are_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    assert write_output("--out", link, "after") == ""
    assert link.is_symlink() and target.read_text() == "after"
    assert write_output("--out", Path("/dev/null"), "after") == "" and Path("/dev/null").is_char_device()
    assert write_output("--out", Path("/dev/full"), "x").endswith("No space left on device")
    assert "Is a directory" in write_output("--out", tmp_path, "x")


class Clock:
    """Time that passes in turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("slowness", "rounds"), [(1, ROUNDS), (2, 4), (100, FEWEST_ROUNDS)])
def test_turns_rotate_and_end_in_time(slowness: float, rounds: int) -> None:
    clock, order = Clock(), list[str]()

    def rate(name: str) -> Any:
        def turn(seconds: float) -> float:
            order.append(name)
            clock.now += slowness * seconds
            return seconds

        return turn

    samples = measure({name: rate(name) for name in "abc"}, 21.0, lambda done, now: None, clock)
    assert [len(each) for each in samples.values()] == [rounds] * 3
    assert order[:9] == list("abcbcacab") and set(samples["a"]) == {1.0}


def test_time_that_is_over_still_measures() -> None:
    samples = measure({"a": lambda seconds: seconds}, -1.0, lambda done, now: None)
    assert samples == {"a": [0.0] * FEWEST_ROUNDS}


@pytest.mark.usefixtures("small")
def test_a_rate_that_varies_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"nvme_read": [1.0, 2.0, 1.4], "memory": [1.0, 1.2, 1.4]}
    assert unsteady(samples) == ["nvme_read"]
    names = {**{name: [2.0] for name in ON_DRIVE}, **samples}
    monkeypatch.setattr(command, "measure", lambda *_: names)
    result = run("bench-links", "--path", folder, *QUICK, "--json")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert line.startswith("note: nvme_read differed by more than half between rounds")


def test_calls_fill_their_turn() -> None:
    issued: list[int] = []

    def wait(calls: int) -> None:
        issued.append(calls)
        time.sleep(0.005 * calls)

    calls = Calls(wait, 10)
    assert issued[:3] == [1, 1, 1] and calls.seconds >= 0.005
    assert 0 < calls(0.05) <= 10 / 0.005 and issued[-1] == max(1, round(0.05 / calls.seconds))
    assert calls(0.0) > 0 and issued[-1] == 1


def test_memory_is_measured_by_the_update_in_the_default_formats() -> None:
    """AdamW reads and writes the parameter, its remainder and two fp32 moments, and reads the gradient."""
    calls, nbytes = adam(14 * 8192)
    assert (calls.amount, nbytes) == ((2 * (2 + 2 + 4 + 4) + 2) * 8192, 14 * 8192)
    assert calls(0.01) > 0


def test_copies_to_a_device_arrive() -> None:
    copies = Copies(LateDevice(delay=100), 4096)
    copies.host.fill_(7)
    copies.to_device(3)
    copies.host.fill_(9)
    copies.to_host(1)
    assert copies.nbytes == 4096 and set(copies.host.tolist()) == {7}


def test_matmuls_have_ended_when_their_call_returns() -> None:
    device = LateDevice()
    rates.first_matmul(device, torch.float32, 16)(2)
    assert [reached.waited for reached in device.reached] == [True]


def test_gathers_have_ended_when_their_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, since they are in order."""
    gathered: list[Reached] = []

    def all_gather(*_: Any) -> Reached:
        gathered.append(Reached())
        return gathered[-1]

    gathers = Gathers.__new__(Gathers)
    gathers._flat = torch.empty(0)
    gathers._ranks = SimpleNamespace(all_gather=all_gather)  # type: ignore[assignment]
    gathers._gather(3)
    assert [transfer.waited for transfer in gathered] == [False, False, True]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_a_matmul_is_as_wide_as_its_time_allows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WIDTHS", (16, 32))
    slow, fast = matmul(CpuDevice(), dtype, 0.0), matmul(CpuDevice(), dtype, 60.0)
    assert slow is not None and fast is not None
    assert (slow[1], fast[1]) == (16, 32) and fast[0].amount == 2 * 32 * 32 * 128 and fast[0](0.01) > 0


def test_a_dtype_that_the_device_lacks_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(rates, "first_matmul", lacking)
    assert matmul(CpuDevice(), torch.float16, 1.0) is None


def test_caches_are_counted_once(tmp_path: Path) -> None:
    listed = [(0, 1, "32K", "0"), (0, 3, "1024K", "0-1"), (1, 3, "1024K", "0-1"), (2, 3, "512K", "2")]
    for cpu, level, size, sharers in listed:
        cache = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
        cache.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", sharers)):
            (cache / name).write_text(f"{text}\n")
    assert cache_bytes(tmp_path) == 1536 << 10
    assert cache_bytes(tmp_path / "none") == 0


def test_the_baseline_is_a_process_that_trained_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = "import psutil, torch; print(psutil.Process().memory_info().rss)"
    least = int(subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, check=True).stdout)
    monkeypatch.setenv("WORLD_SIZE", "2")  # a launcher's variables, with which a process would wait for a second rank
    monkeypatch.setenv("RANK", "1")
    process, with_compiler = process_memory(), process_memory(COMPILER, "import absent_library")
    assert least < process.nbytes < with_compiler.nbytes < 5e9
    assert 0 < process.of_files < process.nbytes / 2
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InfinityError, match="imports torch and infinity ended with 1: ModuleNotFoundError"):
        process_memory()


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    group = Group(2)
    yield group
    group.stop()


def gather(rank: int, dies: bool = False) -> tuple[str, int, int]:
    with Gathers(CpuDevice(), 1 << 16) as gathers:
        if rank > 0:
            gathers.follow()
        else:
            gathers.run(2)
            if dies:
                os._exit(1)
            gathers.run(3)
        return gathers.backend, gathers.nbytes, gathers._ranks.traffic.all_gathers


def test_all_ranks_gather_as_often_as_rank_0(pair: Group) -> None:
    assert pair.run(gather) == [("gloo", 1 << 16, 5)] * 2


def gather_alone(rank: int) -> str:
    try:
        gather(rank, dies=True)
    except RanksError as error:
        return str(error)
    return ""


def test_a_rank_0_that_ends_is_an_error_of_the_others(pair: Group) -> None:
    _, said = pair.run(gather_alone, dies=0)
    assert "another rank ended" in said


@pytest.mark.campaign
def test_ranks_of_torchrun_measure_together(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    bench = ["-m", "infinity.cli.main", "bench-links", "--path", str(folder), *QUICK, "--out", str(out)]
    ended = subprocess.run([*launch, *bench], capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stderr
    links = Links.from_json(out.read_bytes())
    assert links.collective is not None and links.collective > 0 and links.facts["machine"]["ranks"] == 2
    assert ended.stdout.count("nvme_read") == 1
    assert "to 2 ranks over gloo" in json.loads(out.read_text())["measurement"]["how"]["collective"]


def test_the_process_that_is_measured_is_the_first_that_the_kernel_kills(tmp_path: Path) -> None:
    """A container that holds infinity plan, and not the two together, would kill either."""
    file = tmp_path / "score"
    process_memory(f"open({str(file)!r}, 'w').write(open('/proc/self/oom_score_adj').read())")
    assert file.read_text().strip() == "1000"

"""`infinity aio-bench` and `infinity tune`, in this process: output, rejected options, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.cli.drive import tune as tuning
from infinity.cli.drive.measure import Bench, Workload
from infinity.cli.drive.search import Setting, Space
from infinity.config import Config
from infinity.errors import StorageError
from infinity.tiers.io import io_uring_state
from support.commands import SMALL, refused, run

FACTS = [
    "op",
    "size",
    "block_size",
    "queue_depth",
    "threads",
    "engine",
    "gb_per_s",
    "iops",
    "cpu_s_per_gb",
    "latency_ms",
]


@pytest.mark.parametrize("op", ["read", "write", "mixed"])
def test_bench_is_one_json_object(folder: Path, op: str) -> None:
    result = run("aio-bench", "--path", folder, "--op", op, *SMALL, "--runs", "3", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert list(facts)[: len(FACTS)] == FACTS
    assert result.stderr == ""
    assert facts["op"] == op and facts["size"] == 16 << 20 and facts["block_size"] == 256 << 10
    assert 0 < facts["gb_per_s"]["min"] <= facts["gb_per_s"]["median"] <= facts["gb_per_s"]["max"]
    assert 0 < facts["latency_ms"]["p50"] <= facts["latency_ms"]["p99"]
    assert facts["iops"] > 0 and facts["cpu_s_per_gb"] >= 0 and facts["runs"] == 3
    assert facts["verified_bytes"] >= 16 << 20
    assert facts["engine"] == "io_uring" if not io_uring_state() else facts["engine"] != "io_uring"


def test_bench_is_a_table(folder: Path) -> None:
    result = run("aio-bench", "--path", folder, *SMALL, "--runs", "1", "--engine", "libaio")
    assert result.exit_code == 0, result.output
    for words in (
        "GB/s median",
        "IOPS",
        "CPU s per GB",
        "p99 of",
        "1 run",
        "verified",
        "256KiB, 4 in flight on 1 thread",
    ):
        assert words in result.stdout
    assert "…" not in result.stdout
    assert result.stderr.splitlines() == ["laying out 16MiB", "measuring", "verifying"]


def test_bench_over_two_folders(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    result = run("aio-bench", "--path", folder, "--path", other, *SMALL, "--runs", "1", "--op", "mixed", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["paths"] == [str(folder), str(other)]
    assert "one file system" in result.stderr and len(result.stderr.splitlines()) == 1
    assert os.listdir(other) == []


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("--block-size must be a multiple of 4096, such as 4096", ["--block-size", "5000"]),
        ("--block-size must be a multiple of 4096", ["--block-size", "0"]),
        ("--block-size: '1 MiB of' is not a size", ["--block-size", "1 MiB of"]),
        ("--size must be at least two blocks (2MiB)", ["--size", "1MiB"]),
        ("--size: a size cannot be negative", ["--size", "-1"]),
        ("--runs must be between 1", ["--runs", "0"]),
        ("--queue-depth must be between 1", ["--queue-depth", "0"]),
        ("--threads must be between 1", ["--threads", "65"]),
        ("--block-size must be at most 1GiB, not 2GiB", ["--block-size", "2GiB", "--size", "8GiB"]),
        ("--op must be one of read, write, mixed", ["--op", "sideways"]),
        ("--engine must be one of auto, libaio, io_uring", ["--engine", "posix"]),
    ],
)
def test_bench_refuses_bad_options(folder: Path, said: str, options: list[str]) -> None:
    refused(2, said, "aio-bench", "--path", folder, *options)


@pytest.mark.parametrize("command", ["aio-bench", "tune"])
def test_bad_folders_are_refused(command: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused(2, "none does not exist: pass a folder", command, "--path", tmp_path / "none")
    refused(2, "file is not a folder", command, "--path", file)
    refused(2, "lists one folder twice", command, "--path", folder, "--path", folder / ".." / folder.name)
    refused(1, "too little space in", command, "--path", folder, "--size", "1PiB")


def test_a_wrong_byte_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_once = Bench.run

    def run_and_damage(bench: Bench, workload: Workload, **how: Any) -> Any:
        sample = run_once(bench, workload, **how)
        descriptor = bench._swap._fds[-1]
        os.pwrite(descriptor, bytes(8), 8 << 20)
        os.fdatasync(descriptor)
        return sample

    monkeypatch.setattr(Bench, "run", run_and_damage)
    refused(1, f"{folder}: byte 8,388,608 of", "aio-bench", "--path", folder, *SMALL, "--runs", "1")


@pytest.mark.parametrize("command", ["aio-bench", "tune"])
def test_an_interrupt_is_one_line(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bench: Bench, workload: Workload, **how: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupt)
    refused(130, "interrupted; nothing is left", command, "--path", folder, "--size", "16MiB")


@pytest.mark.usefixtures("small_space")
def test_tune_writes_what_the_configuration_takes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "aio.json"
    result = run("tune", "--path", folder, "--size", "16MiB", "--seconds", "1", "--out", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert list(written) == ["aio"]
    assert list(written["aio"]) == ["block_size", "queue_depth", "intra_op_parallelism", "engine"]
    aio = Config.load(out).aio
    assert aio.threads == 1 and aio.engine == "libaio" and aio.block_size in (1 << 18, 1 << 20)
    assert result.stdout.count("← best") == 1 and "…" not in result.stdout
    assert json.loads(result.stdout[result.stdout.index("\n{") :]) == written


@pytest.mark.usefixtures("small_space")
def test_tune_is_one_json_object_and_a_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.png"
    result = run("tune", "--path", folder, "--size", "16MiB", "--seconds", "1", "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert list(facts) == ["aio", "sweep", "verified_bytes"]
    assert facts["sweep"][0]["gb_per_s"]["mixed"] > 0 and facts["verified_bytes"] >= 16 << 20
    assert 10_000 < plot.stat().st_size < 1_000_000


@pytest.mark.usefixtures("small_space")
def test_tune_says_that_one_round_is_no_choice(folder: Path) -> None:
    result = run("tune", "--path", folder, "--size", "16MiB", "--seconds", "0.1")
    assert result.exit_code == 0, result.output
    assert "the best setting was measured only once" in result.stderr


@pytest.mark.usefixtures("small_space")
def test_tune_goes_on_without_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    plot = tmp_path / "sweep.png"
    result = run("tune", "--path", folder, "--size", "16MiB", "--seconds", "0.2", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert [line for line in result.stderr.splitlines() if "matplotlib is missing" in line]
    assert '"aio"' in result.stdout and not plot.exists()


def test_tune_refuses_bad_options(folder: Path, tmp_path: Path) -> None:
    tune = ("tune", "--path", folder)
    refused(2, "--seconds must be between", *tune, "--seconds", "0")
    refused(2, "--size must be at least 16MiB", *tune, "--size", "1MiB")
    refused(2, "--engine must be one of", *tune, "--engine", "posix")
    refused(2, "cannot be written", *tune, "--out", tmp_path / "none" / "aio.json")
    refused(2, "cannot be written", *tune, "--plot", tmp_path)


def works(monkeypatch: pytest.MonkeyPatch, **depths: int) -> None:
    """Let only these engines work, each with a queue depth of that much over all of its threads."""

    def opened(engine: str, *, block_size: int, queue_depth: int, threads: int) -> Any:
        if depths.get(engine, 0) < threads:
            raise StorageError(f"{engine}: Operation not permitted")
        granted = queue_depth
        while granted * threads > depths[engine]:
            granted //= 2
        return contextlib.closing(SimpleNamespace(queue_depth=granted, close=lambda: None))

    monkeypatch.setattr(tuning, "open_engine", opened)


def test_the_space_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    works(monkeypatch, libaio=65536, io_uring=65536)
    assert tuning.space("auto", 2, 1) == Space(threads=(1, 2), engines=("libaio", "io_uring"))
    assert tuning.space("io_uring", 16, 1) == Space(threads=(1, 2, 4), engines=("io_uring",))
    assert tuning.space("auto", 16, 400).threads == (1, 2)  # an engine has 1024 threads at most
    works(monkeypatch, io_uring=65536)
    assert tuning.space("auto", 1, 1) == Space(threads=(1,), engines=("io_uring",))
    for engine in ("auto", "libaio"):
        works(monkeypatch)
        with pytest.raises(StorageError, match="not permitted"):
            tuning.space(engine, 1, 1)


def test_the_default_is_what_auto_comes_to() -> None:
    aio = Config().aio
    both = tuning._default(Space(engines=("libaio", "io_uring")))
    assert both == Setting(aio.threads, aio.queue_depth, aio.block_size, "io_uring")
    assert tuning._default(Space(engines=("libaio",))).engine == "libaio"


def test_the_space_knows_what_is_granted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    works(monkeypatch, libaio=20, io_uring=65536)
    space = tuning.space("auto", 2, 1)
    found = {(each.engine, each.threads, each.queue_depth) for each in space.settings(1 << 40)}
    assert {each for each in found if each[0] == "libaio"} == {
        ("libaio", 1, 4), ("libaio", 1, 8), ("libaio", 1, 16), ("libaio", 2, 4), ("libaio", 2, 8)
    }  # fmt: skip
    assert {depth for kind, _, depth in found if kind == "io_uring"} == set(space.depths)
    (line,) = capsys.readouterr().err.splitlines()
    assert "libaio: 16 of 64 on 1 thread; libaio: 8 of 64 on 2 threads" in line and "fs.aio-max-nr" in line


def test_the_section_says_the_setting() -> None:
    section = tuning.aio_section(Setting(2, 16, 1 << 19, "io_uring"))
    assert list(section) == ["aio"]
    assert list(section["aio"].values()) == [1 << 19, 16, 2, "io_uring"]

"""`aio-bench` and `tune` where the system grants less, names are strange, terminals narrow and disks full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.cli.console import printable, say
from infinity.cli.drive import tune as tuning
from infinity.cli.drive.measure import OPS, Bench, Sample
from infinity.cli.drive.search import Outcome, Result, Setting
from infinity.native import _aio
from support.commands import SMALL, refused, run


@pytest.fixture
def short_of_slots() -> Iterator[None]:
    _aio._inject([{"where": "setup", "error": errno.EAGAIN, "above": 2, "times": -1}])
    yield
    _aio._inject([])


@pytest.mark.usefixtures("short_of_slots")
def test_the_queue_depth_that_was_granted_is_shown(folder: Path) -> None:
    bench: list[str | Path] = ["aio-bench", "--path", folder, *SMALL, "--runs", "1"]
    result = run(*bench, "--json")
    facts = json.loads(result.stdout)
    assert (facts["queue_depth"], facts["queue_depth_asked"]) == (2, 4)
    assert [line for line in result.stderr.splitlines() if "granted a queue depth of 2 instead of 4" in line]
    assert len(result.stderr.splitlines()) == 1
    assert "2 in flight (4 requested) on 1 thread" in run(*bench).stdout


@pytest.mark.usefixtures("short_of_slots")
def test_tune_measures_what_is_granted_once(folder: Path) -> None:
    tune = ("tune", "--path", folder, "--size", "16MiB", "--seconds", "0.5", "--engine", "libaio", "--json")
    result = run(*tune)
    facts = json.loads(result.stdout)
    assert {row["queue_depth"] for row in facts["sweep"]} == {2} and facts["aio"]["queue_depth"] == 2
    settings = [(row["block_size"], row["intra_op_parallelism"]) for row in facts["sweep"]]
    assert len(set(settings)) == len(settings)
    assert "grants less queue depth" in result.stderr


def test_what_cannot_be_had_is_refused_before_the_file_is_laid_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "__init__", lambda *_, **__: pytest.fail("the file is laid out"))
    others = [tmp_path / f"other{number}" for number in range(16)]
    for other in others:
        other.mkdir()
    paths = [each for other in (folder, *others) for each in ("--path", other)]
    refused(2, "--threads 64 for each of 17 folders are 1088", "aio-bench", *paths, "--threads", "64")
    _aio._inject([{"where": "setup", "error": errno.EPERM, "times": -1}])
    try:
        for command in ("aio-bench", "tune"):
            refused(1, "io_uring", command, "--path", folder, "--engine", "io_uring")
            refused(1, "infinity: no I/O engine", command, "--path", folder)
    finally:
        _aio._inject([])


@pytest.mark.parametrize("command", ["aio-bench", "tune"])
def test_names_that_are_too_long_are_refused(command: str, folder: Path) -> None:
    long = folder / ("x" * 300)
    refused(2, "File name too long", command, "--path", long)
    if command == "tune":
        refused(2, "--out", "tune", "--path", folder, "--out", long)
        refused(2, "--plot", "tune", "--path", folder, "--plot", long)


def test_pictures_are_checked_before_the_sweep(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tuning, "sweep", lambda *_: pytest.fail("it is swept"))
    tune = ("tune", "--path", folder)
    refused(2, "sweep.foo must end in one of .", *tune, "--plot", tmp_path / "sweep.foo")
    refused(2, "sweep must end in one of .", *tune, "--plot", tmp_path / "sweep")
    same = tmp_path / "same.png"
    refused(2, "pass two different files", *tune, "--plot", same, "--out", f"{tmp_path}/./same.png")


@pytest.mark.usefixtures("small_space")
def test_the_result_is_shown_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no latex")

    monkeypatch.setattr(tuning, "plot_sweep", fails)
    tune = ("tune", "--path", folder, "--size", "16MiB", "--seconds", "0.2")
    result = run(*tune, "--out", "/dev/full", "--plot", tmp_path / "sweep.png")
    assert result.exit_code == 1 and json.loads(result.stdout[result.stdout.index("\n{") :])["aio"]
    last = result.stderr.splitlines()[-1]
    assert "--out /dev/full was not written: No space left on device" in last and "not drawn: no latex" in last


STRANGE = ["[/foo]", "[bold]", ":smile:", "$x_{$", "a\nb", os.fsdecode(b"\xff\xfe")]


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
@pytest.mark.usefixtures("small_space")
def test_any_name_of_a_folder_will_do(name: str, folder: Path, tmp_path: Path) -> None:
    strange = tmp_path / name
    strange.mkdir(parents=True)
    shown = printable(name)
    for arguments in (["aio-bench", *SMALL, "--runs", "1"], ["report"]):
        result = run(*arguments, "--path", strange, columns=400)
        assert result.exit_code == 0, result.output
        assert shown in result.stdout
    picture = strange / "sweep.png"
    result = run("tune", "--path", strange, "--size", "16MiB", "--seconds", "0.2", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert f"drawn to {printable(picture)}" in result.stderr
    picture.unlink(missing_ok=True)
    refused(2, "none does not exist", "aio-bench", "--path", f"{strange}none")


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_no_figure_is_cut(
    columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = Setting(4, 64, 512 << 10, "io_uring")
    rows = [Result(deep, {op: [Sample(12_340_000_000, 1, 12.3, (), "io_uring", 64)] for op in OPS})]
    monkeypatch.setenv("COLUMNS", str(columns))
    say(tuning.sweep_table(Outcome(deep, rows, rows, deep), width=columns))
    shown = capsys.readouterr().out
    assert "…" not in shown and "12.34" in shown and "0.997" in shown
    assert columns < 60 or max(map(len, shown.splitlines())) <= columns
    result = run("aio-bench", "--path", folder, *SMALL, "--runs", "1", columns=columns)
    assert "…" not in result.stdout and " to " in result.stdout


def test_memory_is_no_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.cli.console.file_system", lambda path: "tmpfs")
    result = run("aio-bench", "--path", folder, *SMALL, "--runs", "1", "--json")
    assert f"note: {folder} is on tmpfs, which is memory" in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["tune", "--help"],
        ["report", "--json"],
        ["aio-bench", *SMALL, "--runs", "1", "--path", "."],
    ],
)
def test_a_full_stdout_is_one_line(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "infinity.cli.main", *arguments]
    path = os.pathsep.join([str(Path(infinity.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=folder, env=environment
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("cannot be written to stdout: No space left on device")
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


def test_the_version_is_shown() -> None:
    assert run("--version").stdout == f"infinity {infinity.__version__}\n"

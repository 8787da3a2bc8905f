"""The command line, run in this process and, once, as the installed command's module."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.cli.report import broken, collect, lines
from infinity.tiers import io
from infinity.tiers.available import Node


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_report_is_one_json_object() -> None:
    result = run("report", "--json")
    facts = json.loads(result.output)
    assert result.exit_code == 0, facts
    assert list(facts) == ["infinity", "machine", "adam", "aio", "torch", "cuda", "folders"]
    assert facts["adam"]["in use"] in facts["adam"]["available"]
    assert facts["aio"]["in use"] in facts["aio"]["available"]
    assert facts["torch"]["version"] and facts["cuda"]["state"] and facts["machine"]["pinnable"]


def test_report_is_lines() -> None:
    result = run("report")
    assert result.exit_code == 0
    for word in ("in use", "queue_depth", "pinnable", "collectives"):
        assert word in result.output


def test_report_shows_numa_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(0, (0, 1, 2, 8), 16 * 10**9), Node(1, (), 10**9)]
    monkeypatch.setattr("infinity.tiers.available.numa_nodes", lambda root: nodes)
    monkeypatch.setattr("infinity.tiers.available.gpu_nodes", lambda environ, root: [1, 0, 1])
    expected = "0 with processors 0-2 8, 16.0 GB and GPU 1, 1 no processors, 1.0 GB and GPU 0 2"
    assert any(line.split(maxsplit=2) == ["NUMA", "nodes", expected] for line in lines(collect()))


@pytest.mark.parametrize(("part", "section"), [("infinity.native._adam", "adam"), ("infinity.native._aio", "aio")])
def test_report_shows_the_loaders_own_error(monkeypatch: pytest.MonkeyPatch, part: str, section: str) -> None:
    load = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name == part:
            raise ImportError("libaio.so.1: cannot open shared object file: No such file or directory")
        return load(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    facts = collect()
    assert broken(facts)
    assert facts[section] == {
        "error": "ImportError: libaio.so.1: cannot open shared object file: No such file or directory"
    }
    result = run("report")
    assert result.exit_code == 1 and "cannot open shared object file" in result.output


def test_report_of_folders(tmp_path: Path) -> None:
    good, bad = tmp_path, tmp_path / "none"
    facts = collect([good])
    assert not broken(facts)
    assert list(facts["folders"]) == [str(good)]
    assert list(facts["folders"][str(good)]) == ["file system", "O_DIRECT", "anonymous files", "free"]
    assert list(tmp_path.iterdir()) == []

    facts = collect([good, bad])
    assert broken(facts)
    assert "does not exist" in facts["folders"][str(bad)]["error"]
    result = run("report", "--path", str(bad))
    assert result.exit_code == 1 and f"{bad} does not exist" in result.output


def test_report_looks_at_the_usual_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone"))
    facts = collect()
    assert list(facts["folders"]) == [str(tmp_path / "gone"), str(tmp_path)]
    assert "does not exist" in facts["folders"][str(tmp_path / "gone")]["not usable"]
    assert not broken(facts)  # training need not use that folder
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert list(collect()["folders"]) == [str(tmp_path)]


def test_report_says_why_io_uring_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Operation not permitted: kernel.io_uring_disabled is 2"
    monkeypatch.setattr(io, "AUTO", ("libaio",))
    monkeypatch.setattr(io, "io_uring_state", lambda: reason)
    facts = collect()
    assert facts["aio"]["io_uring"] == f"not usable: {reason}" and facts["aio"]["libaio"] == "usable"
    assert facts["aio"]["in use"] != "io_uring" and not broken(facts)


def test_every_command_names_what_it_is_called_elsewhere() -> None:
    for command, name in (
        ("report", "ds_report"),
        ("run", "DeepSpeed: deepspeed"),
        ("aio-bench", "ds_io"),
        ("tune", "ds_nvme_tune"),
        ("export", "zero_to_fp32"),
    ):
        assert name in run(command, "--help").output


def test_without_a_command_the_help_is_shown() -> None:
    assert "report" in run().output


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = "import sys, infinity.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_all_unknown_options_and_invalid_values_are_reported_at_once() -> None:
    """Each with its value, and with the options that may be meant. A command line of one problem keeps Typer's text."""
    result = run("plan", "--num-layer", "12", "--hidden-size", "77x", "--gpus=-1", "--jso", "--nodes", "two")
    said = result.stderr
    assert result.exit_code == 2 and "Usage: " in said
    for text in (
        "No such option: --num-layer (Possible options: --num-layers)",
        "No such option: --jso (Possible options: --json, --set)",
        "Invalid value for '--hidden-size': Input should be a valid integer, not '77x'",
        "Invalid value for '--gpus': Input should be greater than or equal to 0, not '-1'",
        "Invalid value for '--nodes': Input should be a valid integer, not 'two'",
    ):
        assert said.count(text) == 1, said
    for arguments, text in (
        (("timeline", "--pngs", "x"), "No such option: --pngs (Possible options: --png)"),
        (("aio-bench", "--threads", "x"), "Missing option '--path'"),
        (("plan", "--num-layers"), "Option '--num-layers' requires an argument."),
        (("run", "--nonsense", "-Zq", "x.py", "--own"), "No such option: -Z"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and text in result.stderr and "--own" not in result.stderr, result.stderr


def test_all_refused_flags_of_the_launcher_are_reported_at_once() -> None:
    result = run("run", "--launcher=pdsh", "--autotuning=run", "x.py", "--elastic_training")
    assert result.exit_code == 2
    assert [line.split(" is refused")[0] for line in result.stderr.splitlines()] == [
        "infinity: --launcher",
        "infinity: --autotuning",
    ]

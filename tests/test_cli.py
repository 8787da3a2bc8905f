"""The command line, run in this process and, once, as the installed command's module."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.cli.report import broken, collect


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_report_is_one_json_object() -> None:
    result = run("report", "--json")
    facts = json.loads(result.output)
    assert result.exit_code == 0, facts
    assert list(facts) == ["infinity", "machine", "adam", "aio", "torch", "cuda"]
    assert facts["adam"]["in use"] in facts["adam"]["available"]
    assert facts["aio"]["in use"] in facts["aio"]["available"]
    assert facts["torch"]["version"] and facts["cuda"]["state"] and facts["machine"]["pinnable"]


def test_report_is_lines() -> None:
    result = run("report")
    assert result.exit_code == 0
    for word in ("in use", "queue_depth", "pinnable", "collectives"):
        assert word in result.output


@pytest.mark.parametrize(("part", "section"), [("infinity._adam", "adam"), ("infinity._aio", "aio")])
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


def test_without_a_command_the_help_is_shown() -> None:
    assert "report" in run().output


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = "import sys, infinity.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

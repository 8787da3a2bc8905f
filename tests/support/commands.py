"""Runs the command line in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from infinity.cli.main import app

SMALL = ["--size", "16MiB", "--block-size", "256KiB", "--queue-depth", "4"]
"""A measurement that takes no time."""


def run(*arguments: str | Path, columns: int = 80) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(columns)})


def refused(code: int, said: str, *arguments: str | Path) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert [line for line in result.stderr.splitlines() if said in line] == result.stderr.splitlines()[-1:]
    assert "Traceback" not in result.stderr

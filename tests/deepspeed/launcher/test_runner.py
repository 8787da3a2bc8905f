"""Variables for all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME, read_exports
from infinity.errors import ConfigError


def test_the_last_file_wins(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("# for all\n\nNCCL_DEBUG=INFO\nPATHS=/x=1:/y \n")
    (tmp_path / "b").write_text("NCCL_DEBUG=WARN\n")
    files = [tmp_path / "a", tmp_path / "none", tmp_path / "b"]
    assert read_exports(files) == {"NCCL_DEBUG": "WARN", "PATHS": "/x=1:/y "}
    assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"


def test_lines_that_set_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("NCCL_DEBUG\nexport X=1\n")
    with pytest.raises(ConfigError) as error:
        read_exports([tmp_path / "a"])
    assert [problem.split(": ")[1] for problem in error.value.problems] == [
        "'NCCL_DEBUG' does not set a variable",
        "'export X=1' does not set a variable",
    ]

"""Every flag of DeepSpeed's launcher has a verdict, the command knows it, and the page lists it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from infinity.cli.main import app
from infinity.deepspeed.launcher.flags import FLAGS, Flag, Verdict, refusal, table
from support.commands import refused

DEEPSPEED = [
    "-H",
    "--hostfile",
    "-i",
    "--include",
    "-e",
    "--exclude",
    "--num_nodes",
    "--num_gpus",
    "--num_accelerators",
    "--master_port",
    "--master_addr",
    "--node_rank",
    "--launcher",
    "--launcher_args",
    "--module",
    "--no_python",
    "--no_local_rank",
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--enable_each_rank_log",
    "--autotuning",
    "--bind_cores_to_rank",
    "--bind_core_list",
    "--ssh_port",
    "--venv_script",
    "--log_level",
    "-q",
    "--quiet",
]
"""Flags in `parse_args` of DeepSpeed 0.19.8's launcher/runner.py."""

EARLIER = ["--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"]
"""Flags of earlier versions."""

PAGE = Path(__file__).parents[3] / "docs" / "launch.md"


def test_every_flag_has_one_verdict() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert sorted(names) == sorted(DEEPSPEED + EARLIER)


def test_the_command_has_exactly_the_flags_that_are_not_refused() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name for parameter in commands["run"].params for name in parameter.opts if name.startswith("-")}
    accepted = {name for flag in FLAGS if flag.verdict is not Verdict.REFUSED for name in flag.names}
    assert options == accepted | {"-m", "--dry-run"}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.verdict is Verdict.REFUSED], ids=lambda f: f.names[0])
def test_refused_flags_are_named_with_the_reason(flag: Flag) -> None:
    (name,) = flag.names
    for form in ([name], [name, "value"], [f"{name}=value"]):
        refused(2, f"{name} is refused. {refusal(name)}", "run", "--num_gpus", "1", *form, "train.py")


def test_a_refused_name_after_the_script_belongs_to_the_script() -> None:
    refused(2, "the script train.py does not exist", "run", "--dry-run", "train.py", "--autotuning", "tune")


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")

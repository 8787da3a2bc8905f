"""Names of DeepSpeed's launcher that other libraries import, such as Accelerate's `accelerate launch`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from infinity.errors import ConfigError

DLTS_HOSTFILE = "/job/hostfile"
"""The default hostfile, read if it exists."""

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
"""Folders searched for the file with variables for all hosts. If both set a variable, the last one wins."""


def read_exports(files: Iterable[Path]) -> Mapping[str, str]:
    """Return the variables in `files`, which have lines NAME=VALUE. Files that do not exist are skipped."""
    variables: dict[str, str] = {}
    problems = []
    for file in files:
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), 1):
            name, equals, value = line.partition("=")
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if not equals or not name.isidentifier():
                problems.append(f"{file}, line {number}: {line!r} does not set a variable: write NAME=VALUE")
            variables[name] = value
    if problems:
        raise ConfigError(problems)
    return variables

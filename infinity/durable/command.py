"""The command that started this process, which `infinity resume` executes again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

_REPLACED = "INFINITY_REPLACED"
"""Environment variable: process id, command line and working directory of the command that became this process."""


def as_replaced() -> dict[str, str]:
    """Return the variable that keeps this process's command, for an environment with which `exec` replaces it.

    The process id tells the new program from its children, which inherit the variable.
    """
    return {_REPLACED: json.dumps([os.getpid(), sys.orig_argv, os.getcwd()])}


def command_line() -> tuple[str, ...]:
    """Return the command line of this process, or of the launcher that started it, with the path of its program.

    Launchers are torchrun, and `infinity run`, which replaces itself by a single rank.
    """
    command, replaced = sys.orig_argv, _replaced()
    if replaced is not None:
        command, _ = replaced
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            command = [os.fsdecode(part) for part in content.removesuffix(b"\0").split(b"\0")]
    program, *arguments = command
    return (shutil.which(program) or program, *arguments)  # PATH may differ when the run is resumed


def start_folder() -> str:
    """Return the working directory in which `command_line()` started, which its relative paths refer to.

    A script may have changed its own (os.chdir, Hydra). That of the start is found if a launcher started the ranks, or
    if the command names the script by a relative path.
    """
    replaced = _replaced()
    if replaced is not None:
        return replaced[1]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{os.getppid()}/cwd")
    main = sys.modules["__main__"]
    script = "" if main.__spec__ else getattr(main, "__file__", None) or ""  # python -m names no path
    for argument in sys.orig_argv[1:]:
        if argument == script:  # those that follow are its own
            break
        if script.endswith(os.sep + argument):  # Python joins the two without normalizing them
            return script.removesuffix(argument)
    return os.getcwd()


def _replaced() -> tuple[list[str], str] | None:
    """Return command line and working directory that `as_replaced` kept for this process; None without them."""
    try:
        process, command, folder = json.loads(os.environ.get(_REPLACED, ""))
    except (ValueError, TypeError):
        return None
    return (command, folder) if process == os.getpid() else None

"""`infinity export` writes a checkpoint as a Hugging Face folder; `infinity import-deepspeed` reads DeepSpeed's.

`infinity resume`: resumes a durable run by the command line that trained it last.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from infinity.cli.console import (
    FAILED,
    USAGE,
    check_one_of,
    fail,
    note,
    one_line_errors,
    printable,
    progress,
    say,
    say_json,
    size_of,
)
from infinity.durable.condition import Condition, condition, owned
from infinity.durable.folder import check_unheld
from infinity.errors import InfinityError
from infinity.sizes import counted, show_bytes


def run_export(
    checkpoint: Path,
    out: Path,
    tag: str | None,
    dtype: str | None,
    max_shard_size: str,
    config_from: Path | None,
    verify: bool,
) -> None:
    """Run the command; see its help."""
    limit = size_of("--max-shard-size", max_shard_size)
    if limit == 0:
        fail("--max-shard-size must be more than 0 bytes", USAGE)
    with one_line_errors():
        from infinity.checkpoint.export import CONFIG, DTYPES, config_beside, export, is_exported

        if dtype is not None:
            check_one_of("--dtype", dtype, list(DTYPES))
        if tag is None and is_exported(checkpoint):
            fail(f"{checkpoint} has weights, which from_pretrained reads: there is nothing to export")
        others = config_from or config_beside(checkpoint)
        with progress(shown=True) as step:
            export(
                checkpoint,
                out,
                tag=tag,
                dtype=dtype,
                max_shard_size=limit,
                config_from=others,
                verify=verify,
                step=step,
            )
        _say_written(out, out.glob("*.safetensors"))
        if config_from is None and others is not None:
            note(f"{CONFIG} and other files of the model were copied from {printable(others)}")
        elif not (out / CONFIG).is_file():
            note(f"for from_pretrained, {out} lacks a {CONFIG}: pass --config-from FOLDER to copy one")


def run_import(checkpoint: Path, out: Path, tag: str | None, optimizer: str | None) -> None:
    """Run the command; see its help."""
    with one_line_errors():
        from infinity.deepspeed.importer.convert import import_deepspeed
        from infinity.rules import RULES

        if optimizer is not None:
            check_one_of("--optimizer", optimizer, [rule.type for rule in RULES.values()])
        with progress(shown=True) as step:
            folder = import_deepspeed(checkpoint, out, tag=tag, optimizer=optimizer, step=step)
        _say_written(folder, filter(Path.is_file, folder.iterdir()))


def _say_written(folder: Path, files: Iterable[Path]) -> None:
    sizes = [file.stat().st_size for file in files]
    say(f"{printable(folder)}: {counted(len(sizes), 'file')}, {show_bytes(sum(sizes))}")


def run(folder: Path, check: bool, as_json: bool) -> None:
    """Run the command; see its help. Returns only with `check`."""
    if as_json and not check:
        fail("--json describes the result of --check: pass both", USAGE)
    folder = folder.absolute()
    with one_line_errors():
        try:
            with owned(folder) as held:
                check_unheld(folder)
                found = condition(held, folder, verify=check)
        except InfinityError as error:
            fail(error, USAGE)
    if check:
        _show(found, as_json=as_json)
        raise typer.Exit(0 if found.is_intact else FAILED)
    with one_line_errors():
        _check_place(found, folder)
        _execute(found)


def _show(found: Condition, *, as_json: bool) -> None:
    if found.absent:
        note(f"{_ranks(found.absent)}: no files on this machine; check the run on the machines that have them")
    for fault in found.faults:
        note(fault)
    if not found.proves:
        note(f"run {printable(found.run)} was written by an older Infinity, whose records do not prove their states")
    if as_json:
        say_json({"run": found.run, "step": found.step, "ranks": found.ranks, "intact": found.is_intact})
        return
    is_empty = found.step is None and not found.faults
    none = "no step is committed" if is_empty else "no committed step can be read"
    step = none if found.step is None else f"step {found.step:,} is the last committed one"
    state = "intact" if found.is_intact else "nothing to resume from" if is_empty else "not intact"
    say(
        f"run {printable(found.run)}, {_ranks(range(found.ranks))}: {step}; {state}",
        f"command, in {printable(found.folder)}: {printable(shlex.join(found.command))}",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _check_place(found: Condition, folder: Path) -> None:
    """Fail for a copy of a run, since the command trains the folder that was copied."""
    try:
        is_copy = bool(found.written_in) and not os.path.samefile(found.written_in, folder)
    except OSError:
        is_copy = True
    if is_copy:
        where = printable(found.written_in)
        fail(
            f"{folder} is a copy of a run in {where}, which its command trains: move it there, or start the command "
            "with a config that names the copy (nvme_path, infinity.run)",
            USAGE,
        )


def _execute(found: Condition) -> None:
    """Print the command and replace this process with it."""
    if not found.command:
        fail(f"the manifest of run {found.run} names no command: start it with the command that began it", USAGE)
    if not os.path.isdir(found.folder):
        fail(f"the working directory {found.folder} does not exist any more: create it, or start the run anew", USAGE)
    os.chdir(found.folder)
    os.environ["PWD"] = found.folder
    program = shutil.which(found.command[0])
    if program is None:
        fail(f"{found.command[0]}, the program of the run, does not exist any more: {shlex.join(found.command)}", USAGE)
    note(f"in {found.folder}: {shlex.join(found.command)}")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, found.command)
    except (OSError, ValueError) as error:
        fail(f"{found.command[0]} cannot be executed: {getattr(error, 'strerror', None) or error}", USAGE)

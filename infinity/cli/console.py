"""Output of all commands: results go to stdout; progress, notes and one-line errors go to stderr.

Checks the folders and files in command-line options before any long work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from infinity.errors import ConfigError, InfinityError
from infinity.inputs import replacing
from infinity.sizes import format_size, parse_size
from infinity.tiers.space import IN_MEMORY

USAGE, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
"""Colours of pictures."""

_WIDEST = 10_000

Step = Callable[[float, str], None]
"""Progress callback: the fraction done, from 0 to 1, and the current activity."""


def printable(text: object) -> str:
    """Return `text` in one line, with "�" for unprintable characters, such as those of undecodable paths."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def note(text: object) -> None:
    """Print one line to stderr."""
    typer.echo(f"note: {printable(text)}", err=True)


def fail(message: object, code: int = FAILED) -> NoReturn:
    """Print one line to stderr and exit with `code`."""
    fail_with_all([message], code)


def fail_with_all(messages: Sequence[object], code: int = FAILED) -> NoReturn:
    """Print a line to stderr for each message and exit with `code`."""
    for message in messages:
        text = " ".join(str(message).split()).replace("(nvme_path)", "(--path)")
        typer.echo(f"infinity: {printable(text)}", err=True)
    raise typer.Exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn OSError, InfinityError and Ctrl-C in the block into a line on stderr for each problem, and an exit code."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename or 'I/O'}: {error.strerror or error}")
    except ConfigError as error:
        fail_with_all(error.problems)
    except InfinityError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; nothing is left on disk", INTERRUPTED)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print each distinct warning in the block once, as a note. Silences the package's log, which would repeat them."""
    shown: set[str] = set()
    log = logging.getLogger("infinity")

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            note(message)

    def silence(_: logging.LogRecord) -> bool:
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = show
        log.addFilter(silence)
        try:
            yield
        finally:
            log.removeFilter(silence)


def say(*results: str | RenderableType) -> None:
    """Print to stdout, without markup and without cutting columns on a narrow terminal.

    If stdout cannot be written, exit with a one-line error, or silently if it is a closed pipe (`| head`)."""
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    shown = console.width
    try:
        for each in results:
            if isinstance(each, str):
                typer.echo(each)
            else:
                if isinstance(each, Table):
                    needed = Measurement.get(console, console.options.update(width=_WIDEST), each).maximum
                    console.width = max(shown, needed)
                console.print(each, crop=False)
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def say_json(facts: Any) -> None:
    say(json.dumps(facts, indent=2))


def stdout_failed(error: OSError) -> NoReturn:
    """Exit with a one-line error, or silently if stdout is a closed pipe."""
    # The interpreter would raise again at exit, when it flushes the rest of the buffer.
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    if error.errno == errno.EPIPE:
        raise typer.Exit(FAILED)
    fail(f"the result cannot be written to stdout: {error.strerror or error}")


@contextmanager
def progress(shown: bool) -> Iterator[Step]:
    """Yield a progress callback: a bar on a terminal, otherwise one line per activity; silent unless `shown`."""
    console = Console(stderr=True)
    if not shown:
        yield lambda done, what: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, expand=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda done, what: bar.update(task, completed=done, description=what)
    else:
        printed: list[str] = []

        def print_activity(done: float, what: str) -> None:
            what = what.partition(";")[0]  # the part after the semicolon changes with every call
            if what not in printed[-1:]:
                printed.append(what)
                typer.echo(what, err=True)

        yield print_activity


def picture_formats() -> list[str]:
    """Return the suffixes of picture files, without the dot; an empty list without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return []
    return sorted(FigureCanvasAgg.get_supported_filetypes())


def size_of(option: str, text: str, least: int = 0) -> int:
    """Return the size in bytes; exit with an error if `text` is not a size, or less than `least`."""
    try:
        size = parse_size(text)
    except ValueError as error:
        fail(f"{option}: {error}", USAGE)
    if size < least:
        fail(f"{option} must be at least {format_size(least)}, not {format_size(size)}", USAGE)
    return size


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Exit with an error unless least <= value <= most."""
    if not least <= value <= most:
        fail(f"{option} must be between {least:g} and {most:g}, not {value:g}", USAGE)


def check_one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        fail(f"{option} must be one of {', '.join(known)}, not {value!r}", USAGE)


def check_folders(paths: Sequence[Path]) -> None:
    """Exit with an error if a folder does not exist or is listed twice."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            fail(f"--path {path} does not exist: pass a folder on the drive to measure", USAGE)
        except OSError as error:
            fail(f"--path {path}: {error.strerror}: pass a folder on the drive to measure", USAGE)
        if not stat.S_ISDIR(mode):
            fail(f"--path {path} is not a folder: pass a folder on the drive to measure", USAGE)
    if len({path.resolve() for path in paths}) < len(paths):
        fail("--path lists one folder twice: pass each drive's folder once", USAGE)


def check_output(option: str, file: Path | None) -> None:
    """Exit with an error if `file` cannot be written. None: the option is not given."""
    if file is None:
        return
    try:
        is_folder = stat.S_ISDIR(file.stat().st_mode)
    except FileNotFoundError:
        writable = os.access(file.parent, os.W_OK | os.X_OK)
    except OSError as error:
        fail(f"{option} {file} cannot be written: {error.strerror}", USAGE)
    else:
        writable = not is_folder and os.access(file, os.W_OK)
    if not writable:
        fail(f"{option} {file} cannot be written: pass a file in an existing, writable folder", USAGE)


def write_output(option: str, file: Path, text: str) -> str:
    """Write `text` to `file`, completely or not at all. Return the error text, or "" on success.

    A file that is no regular one, or that lies in a folder that is not writable, is written in place.
    """
    target = file.resolve()
    try:
        if not os.access(target.parent, os.W_OK) or (target.exists() and not target.is_file()):
            target.write_text(text, encoding="utf-8")
            return ""
        with replacing(target) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{option} {file} was not written: {error.strerror or error}"
    return ""


def write_out(file: Path, text: str) -> str:
    """Write the file of --out, and tell so on stderr. Return the error text, or "" on success."""
    problem = write_output("--out", file, text)
    if not problem:
        typer.echo(f"written to {printable(file)}", err=True)
    return problem


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`, such as "ext4"."""
    import psutil

    resolved = path.resolve()
    parents = {resolved, *resolved.parents}
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(part.mountpoint) in parents]
    if not mounts:
        return "unknown"
    # The innermost mount. If several share a mount point, the last one hides the others.
    return str(max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))[1].fstype)


def note_memory_folders(paths: Sequence[Path]) -> None:
    """Print a note for each folder on a file system in memory."""
    for path in paths:
        kind = file_system(path)
        if kind in IN_MEMORY:
            note(f"{path} is on {kind}, which is memory: the results are those of memory, not of a drive")

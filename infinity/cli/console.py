"""What the commands share: results go to stdout; progress, notes and the one line of an error to stderr."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.errors import InfinityError
from infinity.sizes import parse_size

USAGE, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes."""

Step = Callable[[float, str], None]
"""How much of the whole is done, from 0 to 1, and what goes on."""


def fail(message: object, code: int = FAILED) -> NoReturn:
    """End the command with one line on stderr."""
    text = " ".join(str(message).split()).replace("(nvme_path)", "(--path)")
    typer.echo(f"infinity: {text}", err=True)
    raise typer.Exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What goes wrong in the block ends the command with one line instead of a traceback; so does Ctrl-C."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename or 'I/O'}: {error.strerror or error}")
    except InfinityError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; nothing is left on disk", INTERRUPTED)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """A warning in the block is one line on stderr, once."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            typer.echo(f"note: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = show
        yield


@contextmanager
def progress(shown: bool) -> Iterator[Step]:
    """A bar on a terminal; elsewhere a line for each new thing that goes on; nothing unless `shown`."""
    console = Console(stderr=True)
    if not shown:
        yield lambda done, what: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, expand=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda done, what: bar.update(task, completed=done, description=what)
    else:
        said: list[str] = []

        def say(done: float, what: str) -> None:
            what = what.partition(";")[0]  # what follows a semicolon changes all the time
            if what not in said[-1:]:
                said.append(what)
                typer.echo(what, err=True)

        yield say


def size_of(option: str, text: str) -> int:
    """Bytes; ends the command where `text` is no size."""
    try:
        return parse_size(text)
    except ValueError as error:
        fail(f"{option}: {error}", USAGE)


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Ends the command unless `value` lies between the bounds."""
    if not least <= value <= most:
        fail(f"{option} must be between {least:g} and {most:g}, not {value:g}", USAGE)


def check_one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        fail(f"{option} must be one of {', '.join(known)}, not {value!r}", USAGE)


def check_folders(paths: Sequence[Path]) -> None:
    """Ends the command where a folder is not there, or is there twice."""
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            fail(f"--path {path} {what}: name a folder on the drive to measure", USAGE)
    if len({path.resolve() for path in paths}) < len(paths):
        fail("--path names one folder twice: name each drive's folder once", USAGE)

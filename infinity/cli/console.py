"""What the commands share: results go to stdout; progress, notes and the one line of an error to stderr."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from infinity.errors import InfinityError
from infinity.sizes import parse_size

USAGE, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes."""

_WIDEST = 10_000

Step = Callable[[float, str], None]
"""How much of the whole is done, from 0 to 1, and what goes on."""


def printable(text: object) -> str:
    """A path or message as any terminal, file and font can take it: in one line, and "�" for what is no character."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def note(text: object) -> None:
    """One line on stderr."""
    typer.echo(f"note: {printable(text)}", err=True)


def fail(message: object, code: int = FAILED) -> NoReturn:
    """End the command with one line on stderr."""
    text = " ".join(str(message).split()).replace("(nvme_path)", "(--path)")
    typer.echo(f"infinity: {printable(text)}", err=True)
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
    """A warning in the block is one line on stderr, once. The package's log is silent: commands say it themselves."""
    said: set[str] = set()
    log = logging.getLogger("infinity")

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
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
    """Write to stdout, text as it is: paths are never taken for markup, and no figure is cut, however narrow it is.

    Where it cannot be written, ends the command with one line; without any where a pipe was closed (`| head`)."""
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
    """End the command with one line, or without any where it was a pipe that was closed."""
    # What is left in the buffer would fail once more when the interpreter ends.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if error.errno == errno.EPIPE:
        raise typer.Exit(FAILED)
    fail(f"the result cannot be written to stdout: {error.strerror or error}")


@contextmanager
def progress(shown: bool) -> Iterator[Step]:
    """A bar on a terminal; elsewhere a line for each new thing that goes on; nothing unless `shown`."""
    console = Console(stderr=True)
    if not shown:
        yield lambda done, what: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, expand=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda done, what: bar.update(task, completed=done, description=what)
    else:
        said: list[str] = []

        def tell(done: float, what: str) -> None:
            what = what.partition(";")[0]  # what follows a semicolon changes all the time
            if what not in said[-1:]:
                said.append(what)
                typer.echo(what, err=True)

        yield tell


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

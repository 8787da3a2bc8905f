"""Reads what comes from outside: files that anybody may have written, and environment variables.

Only regular files are opened, so that no pipe is waited for. Sizes are checked before memory is allocated. JSON has a
largest depth, which keeps recursive code within Python's limit.

Writes files that appear complete or not at all, in folders in which others may write, too.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from infinity.errors import UsageError

LARGEST_JSON = 256 << 20
"""Bytes. The index of a checkpoint has some 250 bytes for each parameter. Parsed, JSON takes up to 30 times as much."""
_DEEPEST = 100
"""Levels of nested objects and lists."""
_LONGEST_SHOWN = 60


def open_input(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError with the path, also for a folder, a pipe, a socket or a device, none of which is waited for.
    """
    name = os.fspath(path)
    try:
        _check_regular(os.stat(name), name)  # before the open, which has effects on some devices
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error), name) from None
    try:
        _check_regular(os.fstat(descriptor), name)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", name)


def read_input(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it has more than `largest` bytes."""
    with open_input(path) as file:
        content = b""
        if os.fstat(file.fileno()).st_size <= largest:
            content = file.read(largest + 1)  # it may grow
        if len(content) > largest or os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"Larger than {largest:,} bytes", os.fspath(path))
    return content


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Return the value of `text`. finite: NaN and Infinity, which are no JSON, are errors.

    Raises ValueError, also for a duplicate key, of which json would silently use the last, for a number of more digits
    than Python converts, and for objects or lists nested too deeply.
    """
    constant = _refuse_constant if finite else None
    try:
        content = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(content)
    return content


_TOO_DEEP = f"it nests objects or lists more than {_DEEPEST} levels deep"


def check_depth(content: Any) -> None:
    """Raise ValueError if lists and dicts are nested too deeply for recursive code."""
    level: list[Any] = [[content]]
    for _ in range(_DEEPEST + 1):
        values = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of `pairs`. Raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key} is duplicated in one section; remove one")
            seen.add(key)
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and those that UTF-8 has no bytes for."""


def is_file_name(name: object) -> bool:
    """Return True if `name` names an entry of a folder: one component, without control characters."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
        return False
    return not _CONTROL.search(name)


def member(folder: Path, name: str) -> Path:
    """Return the path of `name`, which a file in `folder` refers to.

    Raises ValueError unless it is a file name, or if a symbolic link there leads out of the folder.
    """
    if not is_file_name(name):
        raise ValueError(f"{name!r} is not the name of a file in {folder}")
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a symbolic link that leads to {path.resolve()}, outside of {folder}")
    return path


def number_of(variable: str, default: int, least: int = 0) -> int:
    """Return the whole number in an environment variable of a launcher; `default` if it is unset or empty.

    Raises UsageError for anything else.
    """
    text = os.environ.get(variable, "") or str(default)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number < 1 << 31:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise UsageError(f"{variable} is {shown!r}, and a whole number from {least} is expected: start with torchrun")
    return number


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new, empty file beside `path`, which replaces `path` after the block, or is removed if the block fails.

    Its name cannot be predicted, so nobody can put a link there that the block would follow. A link at `path` is
    replaced, not followed. Permissions are those of new files (umask). Raises OSError.
    """
    aside = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def show(value: object) -> str:
    """Return `value` as JSON, truncated to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"

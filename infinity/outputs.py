"""Writes files that appear complete or not at all, in folders in which others may write, too."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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

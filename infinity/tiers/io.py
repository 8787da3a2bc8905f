"""Opens the I/O engine that nvme tiers use: io_uring or Linux AIO, whichever the kernel allows."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from infinity import _aio
from infinity.errors import StorageError

ENGINES = ("auto", "libaio", "io_uring")
"""What `aio.engine` takes."""

AUTO = ("io_uring", "libaio")
"""What "auto" tries, the better one first."""

_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")

_log = logging.getLogger("infinity")


def open_engine(engine: str = "auto", *, block_size: int, queue_depth: int, threads: int) -> _aio.Engine:
    """An engine with `threads` I/O threads, each with up to `queue_depth` pieces of `block_size` bytes in flight.

    engine: one of `ENGINES`. "libaio" is Linux AIO, through the library or, without it, by calling the kernel.

    Raises StorageError when the kernel does not give what it takes; the message says why, and what to do.
    """
    refused = []
    for kind in AUTO if engine == "auto" else (engine,):
        reason = "" if _backend(kind) else "this build has none"
        if not reason:
            try:
                return _aio.Engine(block_size, queue_depth, threads, backend=_backend(kind))
            except OSError as error:
                reason = _reason(kind, error)
        refused.append(f"{kind}: {reason}")
        _log.debug("no I/O engine of the kind %s: %s", kind, reason)
    raise StorageError(f"the kernel gives no I/O engine ({'; '.join(refused)}){_instead(engine)}")


def io_uring_state() -> str:
    """Empty when io_uring can be used, else the reason why not."""
    if not _backend("io_uring"):
        return "this build has none"
    try:
        _aio.Engine(4096, 1, 1, backend="io_uring").close()
    except OSError as error:
        return _reason("io_uring", error)
    return ""


def _backend(kind: str) -> str:
    """What the native engine calls the best of this kind; empty where the build has none."""
    return next((name for name in _aio.backends() if (name == "io_uring") == (kind == "io_uring")), "")


def _reason(kind: str, error: OSError) -> str:
    text = error.strerror or str(error)
    if kind != "io_uring":
        return text
    setting = _setting()
    if setting:
        return f"{text}; kernel.io_uring_disabled is {setting}"
    if error.errno == errno.EPERM:
        return f"{text}; a filter of system calls (seccomp), such as containers have, forbids it"
    return text


def _setting() -> str:
    """The value of kernel.io_uring_disabled; empty where it is 0 or not there."""
    try:
        value = _DISABLED.read_text().strip()
    except OSError:
        return ""
    return "" if value == "0" else value


def _instead(engine: str) -> str:
    other = {"io_uring": "libaio", "libaio": "io_uring"}.get(engine)
    return f'; write "engine": "{other}" or "auto" in the section aio' if other else ""

"""Opens the I/O engine of nvme tiers: io_uring, or Linux AIO if the kernel forbids io_uring."""

from __future__ import annotations

import logging
import weakref
from functools import partial

import torch

from infinity.errors import StorageError
from infinity.native import _aio
from infinity.plan.io import IoPlan
from infinity.tiers.memory import before_unmapping

ENGINES = ("auto", "libaio", "io_uring")
"""Values of `aio.engine`."""

AUTO = ("io_uring", "libaio")
"""Engines that "auto" tries, the better one first."""

_log = logging.getLogger("infinity")


def open_engine(engine: str = "auto", *, block_size: int, queue_depth: int, threads: int) -> _aio.Engine:
    """Open an engine with `threads` I/O threads, each with up to `queue_depth` pieces of `block_size` bytes in flight.

    engine: one of `ENGINES`. "libaio" is Linux AIO, through the library or, without it, by system calls.

    Raises StorageError, with the reason and a fix, if the kernel refuses it.
    """
    refused = []
    for kind in AUTO if engine == "auto" else (engine,):
        try:
            return _open(kind, block_size, queue_depth, threads)
        except StorageError as error:
            _log.debug("no I/O engine of the kind %s: %s", kind, error)
            refused.append(f"{kind}: {error}")
    raise StorageError(refused[0] if len(refused) == 1 else "no I/O engine; " + "; ".join(refused))


def engine_of(io: IoPlan) -> _aio.Engine:
    """Open the I/O engine of a plan."""
    return open_engine(io.engine, block_size=io.block_size, queue_depth=io.queue_depth, threads=io.threads)


def register(engine: _aio.Engine, memory: torch.Tensor) -> None:
    """Register memory from `host_tensor` that many requests will use, until it is unmapped."""
    address = memory.data_ptr()
    # Unregistered before the memory is unmapped: otherwise the kernel would continue to use its pages.
    if engine.register(address, memory.numel()):
        before_unmapping(memory, partial(_unregister, weakref.ref(engine), address))


def _unregister(engine: weakref.ref[_aio.Engine], address: int) -> None:
    # The engine may have ended first, and its registrations with it.
    if (alive := engine()) is not None:
        alive.unregister(address)


def io_uring_state() -> str:
    """Return the reason why io_uring cannot be used; empty if it can."""
    try:
        _open("io_uring", 4096, 1, 1).close()
    except StorageError as error:
        return str(error)
    return ""


def _open(kind: str, block_size: int, queue_depth: int, threads: int) -> _aio.Engine:
    backend = next((name for name in _aio.backends() if (name == "io_uring") == (kind == "io_uring")), None)
    if backend is None:
        raise StorageError(f'this build has no {kind}; write another "engine" in the section aio, or "auto"')
    try:
        engine = _aio.Engine(block_size, queue_depth, threads, backend=backend)
    except OSError as error:  # its text names the limit or setting
        raise StorageError(error.strerror or str(error)) from error
    except ValueError as error:  # more threads, over all paths, than an engine supports
        raise StorageError(f"{error} (section aio; threads are intra_op_parallelism × the number of paths)") from error
    # The engine halves its depth until the kernel has enough slots: slower, but no reason to end a training.
    if engine.queue_depth < queue_depth:
        _log.warning(
            "aio.queue_depth is %d instead of %d: the system's slots for asynchronous I/O are short (raise "
            "fs.aio-max-nr with sysctl)",
            engine.queue_depth,
            queue_depth,
        )
    return engine

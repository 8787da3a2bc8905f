"""Asynchronous file I/O on Linux AIO (csrc/aio).

A request is cut into pieces of `block_size` bytes, of which each I/O thread keeps `queue_depth` in flight.  Whole
blocks (address, offset and length multiples of the file's alignment) go through the direct descriptor without a copy;
the unaligned head and tail of a request, and a request whose address and offset differ modulo the alignment, through
the buffered one.  The two are coherent: see csrc/aio/file.h.

Requests that overlap in a file are in order only if the first was waited for before the second was started.
"""

from typing import final

@final
class Request:
    """One transfer.  May be waited for many times and from many threads; keeps no Python object alive, so whoever
    starts a request keeps its buffer, and the file open, until it is done."""

    def wait(self, timeout: float | None = None) -> int:
        """Sleeps until the request is done and returns its size in bytes.

        Raises `OSError(errno, text, path)` if it failed, the same at every call; the text holds the offset and the
        size of the piece that failed and of the request.  A file that ends inside a read is `EIO`.  Raises
        `TimeoutError` when it is not done after `timeout` seconds; it goes on, and can be waited for again.  The GIL
        is released meanwhile, and signal handlers run.
        """

    def done(self) -> bool:
        """Whether it has ended, also when it failed: then no byte of the buffer is under the kernel any more."""

    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far; less than `nbytes` for good when it failed."""

@final
class File:
    """An open file: a descriptor opened with `O_DIRECT` and a second one, buffered, of the same file.  Owns neither."""

    def __init__(self, direct_fd: int, buffered_fd: int, path: str, alignment: int = 4096) -> None:
        """`direct_fd` is -1 when the file system refuses direct I/O; `path` is for messages.  `alignment`, in bytes,
        is a power of two: what direct I/O needs, and not less than the page size, so that no page is shared by direct
        and buffered blocks. Switches read-ahead off for `buffered_fd` if there is a direct one.  Raises
        `ValueError`."""

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> int: ...

@final
class Engine:
    """A fixed number of I/O threads.  Thread safe; sleeps when there is nothing to do."""

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 32, threads: int = 1, *, backend: str = ""
    ) -> None:
        """`block_size`: bytes of one piece, a multiple of 4096.  `queue_depth`: pieces in flight per thread; less is
        taken when the system's AIO slots (`fs.aio-max-nr`) do not suffice.  A request of more than one block is
        shared by all `threads`. `backend`: one of `backends()`, the first by default.  Raises `ValueError`, or
        `OSError` when the kernel has no AIO for us.
        """

    def read(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Starts to read `nbytes` at `offset` into the memory at `address`.  Raises `ValueError` for numbers that
        make no sense and `RuntimeError` when the engine is closed or belongs to a parent process; all else is the
        request's own error."""

    def write(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Starts to write; as `read`.  A write through the buffered descriptor is done when it has reached the
        device."""

    def close(self) -> None:
        """Completes what was started, then ends the threads.  Once is enough, more does no harm; the destructor does
        it too."""

    def __enter__(self) -> Engine: ...
    def __exit__(self, *args: object) -> None: ...
    @property
    def backend(self) -> str:
        """`libaio (static)`, `libaio (shared)` or `kernel aio`."""

    @property
    def block_size(self) -> int: ...
    @property
    def queue_depth(self) -> int:
        """As granted by the system."""

    @property
    def threads(self) -> int: ...
    @property
    def bytes_read(self) -> int:
        """Bytes that all requests together have read so far."""

    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_buffered(self) -> int:
        """Of the bytes read and written, those that went through the page cache: none, when all is aligned."""

def backends() -> list[str]:
    """The names of what can make the AIO calls in this build, best first."""

def _inject(faults: list[dict[str, object]]) -> None:
    """For tests: engines created from now on fail as told (csrc/aio/inject.h lists the faults); `[]` ends it."""

def _release_held() -> int:
    """For tests: lets completions go that a fault with `hold` keeps back, and returns how many."""

"""Asynchronous file I/O on Linux AIO or io_uring (csrc/aio).

A request is cut into pieces of `block_size` bytes, of which each I/O thread keeps `queue_depth` in flight.  Whole
blocks (address, offset and length multiples of the file's alignment) go through the direct descriptor without a copy;
the unaligned head and tail of a request, and a request whose address and offset differ modulo the alignment, through
the buffered one.  The two are coherent: see csrc/aio/file.h.

Requests that overlap in a file are in order only if the first was waited for before the second was started.
"""

from collections.abc import Sequence
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
        is released meanwhile, and signal handlers run.  Raises `RuntimeError` in a forked child: nobody serves it
        there.
        """

    @property
    def mismatch(self) -> bool:
        """Whether it failed because what was read is not what was written, by the checksums of its file."""

    def done(self) -> bool:
        """Whether it has ended, also when it failed: then no byte of the buffer is under the kernel any more."""

    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far; less than `nbytes` for good when it failed."""

@final
class File:
    """An open file: a descriptor opened with `O_DIRECT` and a second one, buffered, of the same file.  Owns neither.

    Or several such files over which the bytes are striped, read and written as one.
    """

    def __init__(self, direct_fd: int, buffered_fd: int, path: str, alignment: int = 4096) -> None:
        """`direct_fd` is -1 when the file system refuses direct I/O; `path` is for messages.  `alignment`, in bytes,
        is a power of two: what direct I/O needs, and not less than the page size, so that no page is shared by direct
        and buffered blocks. Switches read-ahead off for `buffered_fd` if there is a direct one.  Raises
        `ValueError`."""

    @staticmethod
    def striped(files: Sequence[File], chunk: int) -> File:
        """One file over several: byte o is in `files[(o // chunk) % n]`, at `(o // chunk // n) * chunk + o % chunk`.
        `chunk`, in bytes, is a multiple of the alignment.  Direct if all are.  Raises `ValueError`."""

    def keep_checksums(self, nbytes: int, block: int) -> None:
        """From now on every write records a checksum for each `block` bytes (a multiple of 4096; 4 bytes of memory for
        each) of the first `nbytes`, and every read verifies what was written: a mismatch is `EBADMSG`.  Requests then
        start at multiples of `block`, which divides the engine's `block_size`, and end at one or at the end of what is
        in their last block.  Before any request."""

    @property
    def path(self) -> str:
        """For messages; of a striped file, all of them."""

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
        taken, by all threads alike, when the system's AIO slots (`fs.aio-max-nr`) do not suffice.  A request of more
        than one block is shared by all `threads`; with a striped file of n, its member m is served by the threads w
        with w % n == m.  `backend`: one of `backends()`, the first by default.  Raises `ValueError`, or `OSError` when
        the kernel does not let us.
        """

    def read(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Starts to read `nbytes` at `offset` into the memory at `address`.  Raises `ValueError` for numbers that
        make no sense and `RuntimeError` when the engine is closed or belongs to a parent process; all else is the
        request's own error."""

    def write(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Starts to write; as `read`.  A write through the buffered descriptor is done when it has reached the
        device."""

    def register(self, address: int, nbytes: int) -> bool:
        """Tells of memory that requests use again and again: io_uring then pins its pages once, instead of at every
        operation.  Returns whether it did; requests work all the same.  To be taken back with `unregister` before the
        memory is unmapped, or the kernel goes on using what was there."""

    def unregister(self, address: int) -> None:
        """Takes back what was registered at `address`, if anything.  Nothing in it may be under way."""

    def take_latencies(self) -> list[tuple[float, int]]:
        """(milliseconds, pieces), ascending: how long pieces took from submission to completion since the last call,
        within 2 %."""

    def close(self) -> None:
        """Completes what was started, then ends the threads.  Once is enough, more does no harm; the destructor does
        it too."""

    def __enter__(self) -> Engine: ...
    def __exit__(self, *args: object) -> None: ...
    @property
    def backend(self) -> str:
        """`libaio (static)`, `libaio (shared)`, `kernel aio` or `io_uring`."""

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

LARGEST_BLOCK: int
"""Bytes that `block_size` may be."""

MOST_THREADS: int
"""What `threads` may be."""

def backends() -> list[str]:
    """The names of what this build can use: Linux AIO by libaio and by itself, then io_uring."""

def checksum(address: int, nbytes: int) -> int:
    """The checksum of memory as `File.keep_checksums` takes it: 32 bits, made of four CRC-32C."""

def checksum_kind() -> str:
    """What computes it here, such as `crc32c instruction (SSE4.2)`."""

def _portable_checksum(address: int, nbytes: int) -> int:
    """For tests: the same, computed without the processor's CRC instruction."""

def _inject(faults: list[dict[str, object]]) -> None:
    """For tests: engines created from now on fail as told (csrc/aio/faulty_queue.h lists the faults); `[]` ends it."""

def _release_held() -> int:
    """For tests: lets completions go that a fault with `hold` keeps back, and returns how many."""

"""Asynchronous file I/O on Linux AIO or io_uring (csrc/aio).

A request is split into pieces of `block_size` bytes, of which each I/O thread keeps `queue_depth` in flight. Aligned
blocks (address, offset and length multiples of the file's alignment) use the direct descriptor, without a copy. The
unaligned head and tail of a request, and a request whose address and offset differ modulo the alignment, use the
buffered one. The two are coherent; see csrc/aio/file.h.

Overlapping requests to a file are ordered only if the first was waited for before the second was started.
"""

from collections.abc import Sequence
from typing import final

@final
class Request:
    """One transfer. Thread safe. It keeps no Python object alive; the caller keeps its buffer allocated and its file
    open until it is done."""

    def wait(self, timeout: float | None = None) -> int:
        """Sleep until the request is done, and return its size in bytes. May be called any number of times.

        Raises `OSError(errno, text, path)` if the request failed, the same in every call; the text contains the offset
        and the size of the failed piece and of the request. A file that ends inside a read is `EIO`. Raises
        `TimeoutError` if the request is not done after `timeout` seconds; it continues, and can be waited for again.
        Raises `RuntimeError` in a forked child, which has no I/O threads. Releases the GIL and runs signal handlers.
        """

    @property
    def mismatch(self) -> bool:
        """True if the request failed because the bytes read do not match the checksums of its file."""

    def take_repaired(self) -> list[tuple[int, int, str, int]]:
        """Return offset, bytes and path of each block whose bytes did not match their checksum at first and did in a
        second read, and the number of such blocks of its file so far; empty in the next call. The buffer holds the
        right bytes."""

    def done(self) -> bool:
        """Return True once the request has succeeded or failed. The kernel no longer accesses its buffer then."""

    @property
    def times(self) -> tuple[float, float | None]:
        """When it was submitted, and when it was done (None: not yet), on the clock of `time.perf_counter`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far; remains below `nbytes` after a failure."""

@final
class File:
    """An open file: a descriptor opened with `O_DIRECT`, and a buffered one of the same file. Owns neither.

    Or several such files over which the bytes are striped, read and written as one.
    """

    def __init__(self, direct_fd: int, buffered_fd: int, path: str, alignment: int = 4096) -> None:
        """direct_fd: -1 if the file system does not support direct I/O. path: for messages. alignment: bytes, a power
        of two that satisfies direct I/O and is at least the page size, so that direct and buffered blocks share no
        page. Disables read-ahead on `buffered_fd` if there is a direct descriptor. Raises `ValueError`."""

    @staticmethod
    def striped(files: Sequence[File], chunk: int, order: Sequence[int] = ()) -> File:
        """Return one file over several: chunk c of the whole is the next one of file `order[c % len(order)]`. chunk:
        bytes, a multiple of the alignment. order: numbers of files, by default all in turn. Direct if all are. Raises
        `ValueError`."""

    def keep_checksums(self, nbytes: int, block: int) -> None:
        """Record a checksum in every write, and verify it in every read. Call it before any request.

        A block that does not match is read once more from the drive. If the bytes are right then, they are used
        (`Request.take_repaired`). Otherwise the request fails with `EBADMSG`, and its text says whether the second read
        returned the same bytes.

        nbytes: the range from the start of the file that is covered. block: bytes per checksum (of 4 bytes of memory),
        a multiple of 4096 that divides the engine's `block_size`. Requests must start at a multiple of `block`, and end
        at one or at the end of the data in their last block."""

    @property
    def repaired(self) -> int:
        """Blocks so far that were wrong when they were read, and right in a second read."""

    @property
    def checksums(self) -> bytes:
        """Checksums of all blocks, 4 bytes each in this machine's byte order, for `restore_checksums` in another
        process; empty if none are kept. No request may be under way."""

    def restore_checksums(self, packed: bytes) -> None:
        """Set the checksums of all blocks after `keep_checksums`. Raises `ValueError` if their number differs."""

    @property
    def path(self) -> str:
        """Path for messages; of a striped file, all paths."""

    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> int: ...

@final
class Engine:
    """A fixed number of I/O threads, which sleep when idle. Thread safe."""

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 32, threads: int = 1, *, backend: str = ""
    ) -> None:
        """block_size: bytes of one piece, a multiple of 4096. queue_depth: pieces in flight per thread; reduced for all
        threads if the system's AIO slots (`fs.aio-max-nr`) do not suffice. threads: share every request of more than
        one block; member m of a striped file of n is served by the threads w with w % n == m. backend: one of
        `backends()`, by default the first. Raises `ValueError`, or `OSError` if the kernel refuses.
        """

    def read(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Start to read `nbytes` at `offset` into the memory at `address`. Raises `ValueError` for invalid numbers, and
        `RuntimeError` if the engine is closed or belongs to a parent process. Other errors are the request's."""

    def write(self, file: File, offset: int, address: int, nbytes: int) -> Request:
        """Start to write; see `read`. A write through the buffered descriptor is done once it has reached the
        device."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory that many requests will use: io_uring pins its pages once, instead of in every operation.

        Returns False if the memory could not be registered; requests work then, too. Call `unregister` before the
        memory is unmapped, since the kernel would continue to use the old pages."""

    def unregister(self, address: int) -> None:
        """Unregister the memory at `address`; no-op if it is not registered. No request may be using it."""

    def take_latencies(self) -> list[tuple[float, int]]:
        """Return (milliseconds, pieces), ascending: the times from submission to completion, within 2 %, of the pieces
        since the last call."""

    def close(self) -> None:
        """Complete all requests, then end the threads. Idempotent; the destructor calls it, too."""

    def __enter__(self) -> Engine: ...
    def __exit__(self, *args: object) -> None: ...
    @property
    def backend(self) -> str:
        """`libaio (static)`, `libaio (shared)`, `kernel aio` or `io_uring`."""

    @property
    def block_size(self) -> int: ...
    @property
    def queue_depth(self) -> int:
        """Queue depth granted by the system."""

    @property
    def threads(self) -> int: ...
    @property
    def bytes_read(self) -> int:
        """Bytes read so far by all requests."""

    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_buffered(self) -> int:
        """Bytes read and written through the page cache; 0 if all requests were aligned."""

LARGEST_BLOCK: int
"""Largest `block_size`, in bytes."""

MOST_THREADS: int
"""Largest number of `threads`."""

def backends() -> list[str]:
    """Return the names of this build's backends: Linux AIO through libaio, Linux AIO without it, then io_uring."""

def checksum(address: int, nbytes: int) -> int:
    """Return the checksum of memory that `File.keep_checksums` uses: its CRC-32C."""

def checksum_kind() -> str:
    """Return the implementation of `checksum` on this machine, such as `crc32c by VPCLMULQDQ`."""

def _portable_checksum(address: int, nbytes: int) -> int:
    """Return `checksum`, computed by a table. For tests."""

def _instruction_checksum(address: int, nbytes: int) -> int:
    """Return `checksum`, computed by the processor's CRC instruction, or by a table without one. For tests."""

def _inject(faults: list[dict[str, object]]) -> None:
    """Inject `faults` (csrc/aio/faulty_queue.h lists them) into engines created later; `[]` ends it. For tests."""

def _matches() -> list[int]:
    """Return the number of matches of each of the injected faults."""

def _release_held() -> int:
    """Release completions that a fault with `hold` keeps back, and return their number. For tests."""

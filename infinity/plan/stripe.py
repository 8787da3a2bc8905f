"""Striping of one logical file over several files, so that drives work in parallel.

Chunks go to the files in turn. With n files, byte o of the whole is in file (o // chunk) % n, at byte
(o // chunk // n) * chunk + o % chunk of it.

Pure functions; `infinity.tiers.files` creates the files, and the native engine implements the mapping.
"""

from __future__ import annotations

from collections.abc import Iterator

SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 1 << 20


def stripe_chunk(block_size: int) -> int:
    """Return the bytes of a chunk for requests cut into pieces of `block_size` bytes: a multiple of 64 KiB up to 1 MiB.

    A chunk is as large as a piece, so that striping cuts no piece. It is at most 1 MiB, at which a drive has its full
    rate; with larger chunks the 10 MB of an update's tile would not divide evenly. It is a multiple of 64 KiB, so that
    each page of any machine and each checksum block lies in one file.
    """
    return min(-(-block_size // SMALLEST_CHUNK) * SMALLEST_CHUNK, LARGEST_CHUNK)


def shares(nbytes: int, chunk: int, paths: int) -> list[int]:
    """Return the bytes of each of `paths` files that together hold `nbytes`, in whole chunks.

    Each has at least one chunk, since an empty file cannot be probed.
    """
    chunks = -(-nbytes // chunk)
    return [max(1, -(-(chunks - member) // paths)) * chunk for member in range(paths)]


def ranges(offset: int, nbytes: int, chunk: int, paths: int) -> list[tuple[int, int]]:
    """Return the bytes [start, stop) of each of `paths` files that are bytes [offset, offset + nbytes) together."""

    def before(end: int, member: int) -> int:
        """Return the bytes that a file holds of the first `end` bytes."""
        rows, rest = divmod(end, chunk * paths)
        return rows * chunk + min(max(rest - member * chunk, 0), chunk)

    return [(before(offset, member), before(offset + nbytes, member)) for member in range(paths)]


def pieces(offset: int, nbytes: int, chunk: int, paths: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, byte in it, bytes) for bytes [offset, offset + nbytes) in order, cut at chunks."""
    stop = offset + nbytes
    while offset < stop:
        row, inside = divmod(offset, chunk)
        length = min(stop - offset, chunk - inside if paths > 1 else nbytes)
        yield row % paths, row // paths * chunk + inside, length
        offset += length

"""Striping: how the bytes of one logical file are dealt to several, so that drives work at once.

Chunk after chunk goes to the next file, round and round.  With n files, byte o of the whole lies in file
(o // chunk) % n, at byte (o // chunk // n) * chunk + o % chunk of it.

Pure functions; `infinity.tiers.files` creates the files, and the native engine carries the map out.
"""

from __future__ import annotations

SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 1 << 20


def stripe_chunk(block_size: int) -> int:
    """Bytes of a chunk, for requests that are cut into pieces of `block_size` bytes: a multiple of 64 KiB up to 1 MiB.

    As large as a piece, so that striping cuts nothing further.  But not above 1 MiB, which a drive reads and writes at
    its full rate: the 10 MB of an update's tile would else be too few chunks to share evenly.  And not below 64 KiB,
    and a multiple of it, so that a page of any machine and a block of any checksum lies in one file.
    """
    return min(-(-block_size // SMALLEST_CHUNK) * SMALLEST_CHUNK, LARGEST_CHUNK)


def shares(nbytes: int, chunk: int, paths: int) -> list[int]:
    """Bytes of each of `paths` files that together hold `nbytes`, in whole chunks; at least one chunk each, since a
    file without any cannot be tried out.
    """
    chunks = -(-nbytes // chunk)
    return [max(1, -(-(chunks - member) // paths)) * chunk for member in range(paths)]

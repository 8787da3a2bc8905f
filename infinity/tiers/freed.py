"""Freed blocks of the C library: returned to the system, or kept for the next allocation [Note: freed blocks].

glibc maps large blocks one by one and returns each when it is freed. Smaller blocks come from heaps, which keep free
memory between blocks in use. A block is large from 128 KiB on, and once a mapped block was freed, from that block's
size on, up to 32 MiB. A training step that frees activations of several MB thus keeps up to 1.8 times their bytes.

Source: malloc(3) and mallopt(3) of glibc 2.36, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import os

_LARGE, _LARGEST = 256 << 10, 32 << 20
"""Bytes of blocks that are mapped one by one: if freed blocks are returned, and if they are kept."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"

_library = ctypes.CDLL(None)
_trim = getattr(_library, "malloc_trim", None)  # glibc's
_option = getattr(_library, "mallopt", None)


def return_freed_memory() -> None:
    """Return freed heap memory to the system.

    The C library keeps free memory between used blocks, which grows with the model if large blocks are freed among
    small ones that stay.
    """
    if _trim is not None:
        _trim(0)


def return_freed_blocks() -> None:
    """Return each block of 256 KiB or more that is allocated from now on to the system when it is freed.

    Its pages are mapped again in the next step, which lengthened steps by 18 % (bench/freed.py). Has no effect if the
    environment has settings of glibc's malloc, or with another C library.
    """
    if _option is not None and not _chosen_by_user():
        _option(_MMAP_THRESHOLD, _LARGE)


def keep_freed_blocks() -> None:
    """Keep freed blocks below 32 MiB, as glibc does by default once a block of that size was freed."""
    if _option is not None and not _chosen_by_user():
        _option(_MMAP_THRESHOLD, _LARGEST)
        _option(_TRIM_THRESHOLD, 2 * _LARGEST)


def _chosen_by_user() -> bool:
    """Return whether the environment sets how glibc's malloc returns blocks."""
    return any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get(_TUNABLES, "")

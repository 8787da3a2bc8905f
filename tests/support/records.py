"""Records of commits in other versions of their format."""

from __future__ import annotations

import struct
import zlib

HEAD = 20


def of_version(content: bytes, version: bytes, *, head: int = HEAD) -> bytes:
    """Return the record with the bytes of `content` after its head, in format `version`: two digits.

    head: bytes of the head of `content`.
    """
    magic, rest = b"INFDUR" + version, content[head:]
    checksum = zlib.crc32(rest) if version in (b"01", b"02") else zlib.crc32(magic + rest)
    return magic + struct.pack("<QI", len(rest), checksum) + rest

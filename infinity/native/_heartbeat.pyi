"""Signs of life to other ranks (native, `csrc/heartbeat/`)."""

from collections.abc import Sequence

def beat(sockets: Sequence[int], period: float, stop: int) -> None:
    """Send one newline to each socket every `period` seconds, until the descriptor `stop` is readable or its other end
    closed. Releases the GIL for the whole call.

    Never blocks on a socket, and ignores errors. No socket may be closed during the call: its number may be reused.
    Raises ValueError for a period outside of (0, 3600].
    """

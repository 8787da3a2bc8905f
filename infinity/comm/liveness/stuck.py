"""Ends the process if its main thread waits for a lost rank in a call that nothing else ends.

The engine can end waits in its own groups, not in those of the script. See [Note: ranks that end or hang].
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from infinity.observe.log import logger

EXIT_STATUS = 75
"""Exit status of a process that is ended: EX_TEMPFAIL of sysexits.h."""
PATIENCE = 10.0
"""Seconds of one wait after which the process ends."""
_LIBRARY = os.path.dirname(dist.__file__) + os.sep
_OPERATORS = torch._ops.__file__
"""Its frames call the operators of torch, such as the collectives of DTensors."""


class StuckMain:
    """Watches the main thread."""

    def __init__(self, ending: Callable[[str], None]) -> None:
        """ending: called with the cause before the process ends."""
        self._ending = ending
        self._wait: tuple[int, int] | None = None
        self._since = 0.0

    def check(self, cause: str) -> None:
        """End the process if all calls of this function in `PATIENCE` seconds found the main thread in the same call of
        torch.distributed. cause: the error to print.
        """
        wait, now = _present_wait(), time.monotonic()
        if wait is None or wait != self._wait:
            self._wait, self._since = wait, now
        elif now - self._since >= PATIENCE:
            logger.error(
                "%s. The script waits for that rank in torch.distributed, so this process ends with exit status %d. "
                "Fix the error and restart all ranks.",
                cause,
                EXIT_STATUS,
            )
            self._ending(cause)
            # os._exit flushes nothing. It is needed, since an exception would end this thread alone.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(EXIT_STATUS)


def _present_wait() -> tuple[int, int] | None:
    """Return what identifies the main thread's call of torch.distributed; None if it is in no such call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == _OPERATORS:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_LIBRARY):
        return None
    # The same frame at the same instruction counts as the same call.
    return id(frame), frame.f_lasti

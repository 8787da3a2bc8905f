"""What the engine says while it works: the logger `infinity`, shown on stderr unless the program has set up logging."""

from __future__ import annotations

import logging

logger = logging.getLogger("infinity")


def show_by_default() -> None:
    """Give the logger a plain handler where the program configured neither it nor the root logger."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[infinity] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)

"""DeepSpeed's logging functions over the logger `infinity`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.deepspeed.checks import WrongValue
from infinity.deepspeed.comm import get_rank
from infinity.observe.log import logger as logger


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all ranks if `ranks` is None or contains -1."""
    rank = get_rank()
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default of `infinity`, and of its handlers.

    log_level_str: "debug", "info", "warning", "error" or "critical". Raises UsageError for others.
    """
    level = _LEVELS.get(str(log_level_str).lower())
    if level is None:
        raise WrongValue(f"log level is {log_level_str!r}: pass one of {', '.join(_LEVELS)}")
    target = logger if custom_logger is None else custom_logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}

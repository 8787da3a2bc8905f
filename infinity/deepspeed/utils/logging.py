"""DeepSpeed's logging functions over the logger `infinity`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.deepspeed.comm import get_rank
from infinity.observe.log import logger as logger


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all ranks if `ranks` is None or contains -1."""
    rank = get_rank()
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)

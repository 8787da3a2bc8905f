"""The logger `infinity`: shown on stderr unless the program has set up logging."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from infinity.observe.ledger import Ledger
from infinity.observe.recorder import Recorder

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


def log_summary(text: str) -> None:
    """Log `text` as information if the logger shows warnings but no information.

    transformers' Trainer sets this level by default. A level of errors keeps the logger silent.
    """
    if logger.isEnabledFor(logging.WARNING) and not logger.isEnabledFor(logging.INFO):
        logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


_FULL = 3
"""Steps after which memory has been used as in all later ones: the first ones store gradients that others do not."""


class StepLog:
    """A line every `every` steps; none where `every` is 0. Once, a line on memory that the steps have left."""

    def __init__(self, ledger: Ledger, recorder: Recorder, every: int) -> None:
        self._ledger, self._recorder = ledger, recorder
        self._every = every
        self._said = ledger.snapshot()
        self._steps = 0

    def step(self, number: int, loss: torch.Tensor | None, lr: float, grad_norm: Callable[[], float | None]) -> None:
        """Step `number` is done; `loss` is that of its last micro-batch on this rank, or None if it is not known.

        grad_norm: called for a line.
        """
        self._steps += 1
        if self._every and self._steps == _FULL and (line := self._ledger.spare()):
            logger.info("%s", line)
        if not self._every or number % self._every:
            return
        norm = grad_norm()
        now = self._ledger.snapshot()
        since, self._said = now - self._said, now
        logger.info(
            "step %d: %slr %.3g%s, %.3g s a step, waited %.0f %%, nvme %.2f GB/s read and %.2f written",
            number,
            f"loss {self._recorder.loss(loss):.4f}, " if loss is not None else "",
            lr,
            f", gradient norm {norm:.3g}" if norm is not None else "",
            since.seconds / self._every,
            100 * since.wait_seconds / since.seconds,
            since.nvme_bytes_read / since.seconds / 1e9,
            since.nvme_bytes_written / since.seconds / 1e9,
        )

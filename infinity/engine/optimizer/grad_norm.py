"""The norm of a step's gradient before clipping."""

from __future__ import annotations

import math
from collections.abc import Callable


class GradNorm:
    """Norm of the last step's whole gradient: known after a step that needed it, else computed when it is read."""

    def __init__(self) -> None:
        self.known: float | None = None
        """The norm; None if it is unknown or was not read yet."""
        self._squares: Callable[[], float] | None = None
        self._scale = 1.0

    def forget(self) -> None:
        """Reset, before the norm of another step."""
        self.known = self._squares = None

    def set(self, norm: float) -> None:
        self.known = norm

    def set_later(self, squares: Callable[[], float], scale: float) -> None:
        """Compute the norm when it is read. squares: returns the sum of squares of gradients × 1 / `scale`."""
        self._squares, self._scale = squares, scale

    def read(self) -> float | None:
        """Return the norm; None if it is unknown. Waits for gradients on their way."""
        if self._squares is not None:
            self.known, self._squares = math.sqrt(self._squares()) * self._scale, None
        return self.known

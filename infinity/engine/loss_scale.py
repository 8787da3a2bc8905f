"""The loss scale of fp16 training (Micikevicius et al. 2018).

Backward runs on loss × scale, so that small gradients do not underflow; the update divides by the scale. A step whose
gradients overflowed is skipped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from infinity.config import FP16
from infinity.errors import NonFiniteError

_FACTOR = 2.0
_MOST_SKIPPED = 20
"""Number of consecutive skipped steps at the smallest scale after which training stops."""


@dataclass
class LossScale:
    """The present loss scale. The engine reports each step's outcome, which is the same on all ranks.

    `window` steps without overflow double the scale, `hysteresis` overflows halve it. A window of 0 makes it constant.
    """

    value: float
    window: int = 0
    hysteresis: int = 1
    consecutive: bool = False
    """True if a step without overflow restores the hysteresis; else only an increase does."""
    least: float = 1.0
    tolerance: int = 1
    """Overflows left until the scale is halved."""
    good: int = 0
    """Steps since the last overflow or increase."""
    skipped_in_a_row: int = 0

    @classmethod
    def of(cls, config: FP16) -> LossScale:
        """Return the scale for the config section `fp16`; a constant 1 if it is disabled."""
        if not config.enabled:
            return cls(1.0)
        if config.loss_scale > 0:
            return cls(config.loss_scale, least=config.loss_scale)
        start = max(_FACTOR**config.initial_scale_power, config.min_loss_scale)
        return cls(
            start,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            consecutive=config.consecutive_hysteresis,
            least=config.min_loss_scale,
            tolerance=config.hysteresis,
        )

    def passed(self) -> None:
        """Record a step without overflow."""
        self.skipped_in_a_row = 0
        self.good += 1
        if self.consecutive:
            self.tolerance = self.hysteresis
        if self.window and self.good == self.window:
            self.good = 0
            self.tolerance = self.hysteresis
            self.value *= _FACTOR

    def overflowed(self) -> None:
        """Record a skipped step, whose gradients were not finite.

        Raises NonFiniteError after 20 in a row at the smallest scale.
        """
        self.good = 0
        if self.value > self.least and self.window:
            self.skipped_in_a_row = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.value = max(self.value / _FACTOR, self.least)
                self.tolerance = 1
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= _MOST_SKIPPED:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} steps in a row were skipped, since their gradients are NaN or infinite at "
                f"the smallest loss scale, {self.value:g}: the model diverges, or overflows in its forward. Load an "
                "earlier checkpoint and lower the learning rate, or train with bf16, which has the range of fp32."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress, unless the scale is constant."""
        if self.window:
            for name in _PROGRESS:
                setattr(self, name, state[name])


class ScaledBackwards:
    """Counts the backwards of a step that did not start from a scaled loss.

    A hook on the scaled loss runs in the backward that passes through it. A scaled loss without a backward, or a
    `zero_grad` between the two, therefore does not change the count.
    """

    def __init__(self) -> None:
        self.unscaled = 0
        self._passed = False

    def watch(self, scaled: torch.Tensor) -> torch.Tensor:
        """Register the hook on `scaled`, a loss that was multiplied by the scale, and return it."""
        if scaled.requires_grad:
            scaled.register_hook(self._pass)
        return scaled

    def _pass(self, gradient: torch.Tensor) -> None:
        self._passed = True

    def end(self, *, counts: bool) -> None:
        """Record the end of a backward. counts: it produced gradients; `torch.autograd.grad` produces none."""
        self.unscaled += counts and not self._passed
        self._passed = False

    def forget(self) -> None:
        """Reset the count: the step ended, or its gradients were dropped."""
        self.unscaled = 0
        self._passed = False


_PROGRESS = ("value", "tolerance", "good", "skipped_in_a_row")

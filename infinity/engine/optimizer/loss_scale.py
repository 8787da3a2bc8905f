"""The loss scale of fp16 training (Micikevicius et al. 2018).

Backward runs on loss × scale, so that small gradients do not underflow; the update divides by the scale. A step whose
gradients overflowed is skipped.

Names under which DeepSpeed's optimizers report the loss scale. Accelerate, Megatron-LM and scripts read them.

The norm of a step's gradient before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from infinity.errors import NonFiniteError, UsageError

if TYPE_CHECKING:
    from infinity.config import Config

_FACTOR = 2.0
_AUTOCAST_START, _AUTOCAST_WINDOW = 2.0**16, 2000
"""First scale and window of `torch.amp.GradScaler`, which belongs to float16 autocast."""
_AUTOCAST_LEAST = 2.0**-14
"""GradScaler has no smallest scale; training stops at float16's smallest normal number."""
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

    restart: int = 0
    """Value of `good` after an overflow. -1 in DeepSpeed, whose window is one step longer then and at the start."""
    overflow: bool = field(default=False, compare=False)
    """True if the last step was skipped."""
    steps: int = field(default=0, compare=False)
    """Number of steps so far in this process."""

    @classmethod
    def of(cls, config: Config) -> LossScale:
        """Return the scale of section `fp16`, else that of float16 autocast; a constant 1 if neither is enabled."""
        fp16 = config.fp16
        if not config.scales_loss:
            return cls(1.0)
        if not fp16.enabled:
            return cls(_AUTOCAST_START, window=_AUTOCAST_WINDOW, least=_AUTOCAST_LEAST)
        if fp16.loss_scale > 0:
            return cls(fp16.loss_scale, least=fp16.loss_scale)
        return cls(
            max(_FACTOR**fp16.initial_scale_power, fp16.min_loss_scale),
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
            least=fp16.min_loss_scale,
            tolerance=fp16.hysteresis,
        )

    @property
    def is_dynamic(self) -> bool:
        """Return whether overflows and steps without overflow change the scale."""
        return self.window > 0

    def count_as_deepspeed(self) -> None:
        """Make the first window, and the first after every overflow, one step longer. Call it before training."""
        self.good = self.restart = -1

    def passed(self) -> None:
        """Record a step without overflow."""
        self.steps += 1
        self.overflow = False
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
        self.steps += 1
        self.overflow = True
        self.good = self.restart
        if self.value > self.least and self.window:
            self.skipped_in_a_row = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.value = max(self.value / _FACTOR, self.least)
                self.tolerance = 1
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= _MOST_SKIPPED:
            unscaled = self.value == 1.0 and not self.window
            at = "" if unscaled else f" at the smallest loss scale, {self.value:g}"
            hint = "" if unscaled else ", or train with bf16, which has the range of fp32"
            raise NonFiniteError(
                f"{self.skipped_in_a_row} steps in a row were skipped, since their gradients are NaN or infinite{at}: "
                "the model diverges, or overflows in its forward. Load an earlier checkpoint and lower the learning "
                f"rate{hint}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress, unless the scale is constant."""
        self.overflow = False
        if self.is_dynamic:
            for name in _PROGRESS:
                setattr(self, name, state[name])


_PROGRESS = ("value", "tolerance", "good", "skipped_in_a_row")


class LossScaler:
    """Reports a loss scale under the names of DeepSpeed's `LossScaler`."""

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    @property
    def cur_scale(self) -> float:
        """The present loss scale; 1 in fp32 and bf16."""
        return self._scale.value

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """True if overflows change the scale."""
        return self._scale.is_dynamic

    @property
    def cur_iter(self) -> int:
        """Number of steps so far, including skipped ones."""
        return self._scale.steps

    @property
    def scale_window(self) -> int:
        """Steps without overflow after which the scale is doubled; 0 for a constant scale."""
        return self._scale.window


class LossScaleNames:
    """Properties of an engine's optimizer. Each reads the engine's loss scale at every use."""

    _loss_scale: LossScale
    custom_loss_scaler = False

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped, since its gradients overflowed in float16."""
        return self._loss_scale.overflow

    @property
    def cur_scale(self) -> float:
        """The present loss scale; 1 in fp32 and bf16. It cannot be set."""
        return self._loss_scale.value

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        _refuse(f"cur_scale = {value}")

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 in fp32 and bf16. It cannot be set."""
        return self._loss_scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        _refuse(f"loss_scale = {value}")

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if overflows change the loss scale."""
        return self._loss_scale.is_dynamic

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale under the names of DeepSpeed's `LossScaler`."""
        return LossScaler(self._loss_scale)

    def needs_scaler(self) -> bool:
        """Return whether a plain backward needs `engine.scale(loss)` for the loss scale."""
        return self._loss_scale.is_dynamic or self._loss_scale.value != 1.0

    def override_loss_scale(self, loss_scale: float) -> NoReturn:
        """Raise UsageError, since the config sets the loss scale."""
        _refuse(f"override_loss_scale({loss_scale})")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"optimizer.{what} was called, but the engine owns the loss scale: set fp16.loss_scale (constant) or "
        "fp16.initial_scale_power in the config"
    )


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

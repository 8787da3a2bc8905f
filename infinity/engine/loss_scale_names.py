"""Names under which DeepSpeed's optimizers report the loss scale. Accelerate, Megatron-LM and scripts read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from infinity.errors import UsageError

if TYPE_CHECKING:
    from infinity.engine.loss_scale import LossScale


class LossScaler:
    """Reports a loss scale under the names of DeepSpeed's `LossScaler`."""

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    @property
    def cur_scale(self) -> float:
        """The present loss scale; 1 in fp32 and bf16."""
        return self._scale.value

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 in fp32 and bf16."""
        return self._scale.value

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

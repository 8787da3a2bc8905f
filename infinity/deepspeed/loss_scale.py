"""The fp16 loss scale with DeepSpeed's count of good steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from infinity.engine.loss_scale import LossScale


@dataclass
class DeepSpeedLossScale(LossScale):
    """Doubles after `window` + 1 steps without overflow at the start and after an overflow, then every `window`."""

    @classmethod
    def after(cls, scale: LossScale) -> DeepSpeedLossScale:
        """Return the scale of an engine that has not trained."""
        return cls(**{**{field.name: getattr(scale, field.name) for field in fields(scale)}, "good": -1})

    def overflowed(self) -> None:
        super().overflowed()
        self.good = -1

"""Names of `deepspeed.runtime.zero.offload_config`. The sections' classes are imported when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infinity.deepspeed.offload_names import (
    OffloadDeviceEnum as OffloadDeviceEnum,
    OffloadStateTypeEnum as OffloadStateTypeEnum,
)

if TYPE_CHECKING:
    from infinity.deepspeed.runtime.zero.config import (
        DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig,
    )


def __getattr__(name: str) -> Any:
    if name in ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"):
        from infinity.deepspeed.runtime.zero import config  # here, since pydantic takes long to import

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

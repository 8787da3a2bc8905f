"""Names of `deepspeed.runtime.zero.offload_config`."""

from infinity.deepspeed.offload_names import (
    OffloadDeviceEnum as OffloadDeviceEnum,
    OffloadStateTypeEnum as OffloadStateTypeEnum,
)

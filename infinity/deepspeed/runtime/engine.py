"""Names of `deepspeed.runtime.engine`."""

from infinity.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine

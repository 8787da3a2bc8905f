"""`deepspeed.runtime.zero.parameter_offload`."""

from infinity.deepspeed.parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload

"""`deepspeed.zero`: construction and gathering of models that are larger than memory."""

from infinity.deepspeed.parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
from infinity.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters as GatheredParameters,
    Init as Init,
    ZeroParamStatus as ZeroParamStatus,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
    unwrap_model_for_generation as unwrap_model_for_generation,
)
from infinity.deepspeed.runtime.zero.tiling import TiledLinear as TiledLinear


def __getattr__(name: str) -> object:
    if name == "TiledLinearReturnBias":
        raise AttributeError("deepspeed.zero.TiledLinearReturnBias is not supported: tiles return no bias of their own")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`deepspeed.zero`: construction and gathering of models that are larger than memory."""

from infinity.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters as GatheredParameters,
    Init as Init,
    ZeroParamStatus as ZeroParamStatus,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
    unwrap_model_for_generation as unwrap_model_for_generation,
)

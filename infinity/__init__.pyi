from infinity import nn as nn
from infinity.checkpoint.pretrained import load_pretrained as load_pretrained
from infinity.config import Config as Config
from infinity.construction.init_context import Init as Init
from infinity.engine.arguments import add_config_arguments as add_config_arguments
from infinity.engine.gather import (
    GatheredParameters as GatheredParameters,
    get_full_fp32_param as get_full_fp32_param,
    get_full_grad as get_full_grad,
    get_full_optimizer_state as get_full_optimizer_state,
    set_full_fp32_param as set_full_fp32_param,
    set_full_grad as set_full_grad,
    set_full_optimizer_state as set_full_optimizer_state,
)
from infinity.engine.inference import InferenceEngine as InferenceEngine
from infinity.engine.initialize import init_inference as init_inference, initialize as initialize
from infinity.engine.stream import stream_weights as stream_weights
from infinity.engine.training import TrainingEngine
from infinity.errors import InfinityError as InfinityError

Engine = TrainingEngine

__version__: str
__all__: list[str]

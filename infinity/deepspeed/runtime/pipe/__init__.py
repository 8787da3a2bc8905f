"""Modules and placeholders of `deepspeed.runtime.pipe`."""

from infinity.deepspeed.absent import PIPELINE, placeholders
from infinity.deepspeed.lazy import first_of, submodules

__getattr__ = first_of(
    submodules(__name__, "engine", "module", "schedule", "topology"),
    placeholders(__name__, PIPELINE, ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology")),
)

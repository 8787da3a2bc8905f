"""Placeholders of `deepspeed.runtime.pipe.module`."""

from infinity.deepspeed.absent import PIPELINE, placeholders

__getattr__ = placeholders(
    __name__,
    PIPELINE,
    ("PipelineModule", "LayerSpec", "TiedLayerSpec", "PipelineError"),
)

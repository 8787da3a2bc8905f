"""Placeholders of `deepspeed.runtime.pipe.engine`."""

from infinity.deepspeed.absent import PIPELINE, placeholders

__getattr__ = placeholders(
    __name__,
    PIPELINE,
    ("PipelineEngine",),
)

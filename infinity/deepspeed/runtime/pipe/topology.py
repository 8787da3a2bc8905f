"""Placeholders of `deepspeed.runtime.pipe.topology`."""

from infinity.deepspeed.absent import PIPELINE, placeholders

__getattr__ = placeholders(
    __name__,
    PIPELINE,
    ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid"),
)

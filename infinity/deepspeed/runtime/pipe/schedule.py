"""Placeholders of `deepspeed.runtime.pipe.schedule`."""

from infinity.deepspeed.absent import PIPELINE, placeholders

__getattr__ = placeholders(
    __name__,
    PIPELINE,
    ("PipeSchedule", "InferenceSchedule", "TrainSchedule", "DataParallelSchedule", "PipeInstruction"),
)

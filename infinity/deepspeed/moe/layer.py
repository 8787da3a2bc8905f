"""Placeholders of `deepspeed.moe.layer`."""

from infinity.deepspeed.absent import EXPERTS, placeholders

__getattr__ = placeholders(
    __name__,
    EXPERTS,
    ("MoE",),
)

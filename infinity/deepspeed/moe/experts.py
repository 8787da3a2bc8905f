"""Placeholders of `deepspeed.moe.experts`."""

from infinity.deepspeed.absent import EXPERTS, placeholders

__getattr__ = placeholders(
    __name__,
    EXPERTS,
    ("Experts",),
)

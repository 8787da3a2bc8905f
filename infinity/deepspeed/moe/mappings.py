"""Placeholders of `deepspeed.moe.mappings`."""

from infinity.deepspeed.absent import EXPERTS, placeholders

__getattr__ = placeholders(
    __name__,
    EXPERTS,
    ("gather_tokens", "drop_tokens"),
)

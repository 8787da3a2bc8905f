"""Placeholders of `deepspeed.moe.sharded_moe`."""

from infinity.deepspeed.absent import EXPERTS, placeholders

__getattr__ = placeholders(
    __name__,
    EXPERTS,
    ("MOELayer", "TopKGate", "top1gating", "top2gating", "topkgating"),
)

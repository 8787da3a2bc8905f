"""Former name of `infinity.engine.schedules`, which scripts import and pickled schedulers contain."""

from infinity.engine.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

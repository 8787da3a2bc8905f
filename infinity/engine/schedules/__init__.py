"""Learning-rate schedules: one family of formulas, with which a config's schedulers and DeepSpeed's classes compute."""

from infinity.engine.schedules.classes import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

"""The configuration: `Config.load(dict or path)` validates all keys and raises one error that lists every problem.

The keys are DeepSpeed's, and one section `infinity`; docs/config.md lists them.
"""

from infinity.config.batch import Batch
from infinity.config.optimization import (
    Optimizer,
    Scheduler,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from infinity.config.sections import BF16, FP16, Aio, Config, DataTypes, Infinity, Offload, ZeroOptimization

__all__ = [
    "BF16",
    "FP16",
    "Aio",
    "Batch",
    "Config",
    "DataTypes",
    "Infinity",
    "Offload",
    "Optimizer",
    "Scheduler",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOptimization",
]

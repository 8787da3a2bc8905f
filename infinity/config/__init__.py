"""The configuration: `Config.load(dict or path)` validates all keys and raises one error that lists every problem.

The keys are DeepSpeed's, and one section `infinity`; docs/config.md lists them.
"""

from infinity.config.batch import Batch
from infinity.config.draft import Dialect, Fill, Notes, hidden_size_of
from infinity.config.infinity import Infinity
from infinity.config.load import read_content
from infinity.config.optimization import (
    LRRangeTest,
    OneCycle,
    Optimizer,
    Scheduler,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from infinity.config.precision import BF16, FP16, DataTypes, TorchAutocast
from infinity.config.sections import Config
from infinity.config.storage import Aio, Offload, ZeroOptimization

__all__ = [
    "BF16",
    "FP16",
    "Aio",
    "Batch",
    "Config",
    "DataTypes",
    "Dialect",
    "Fill",
    "Infinity",
    "LRRangeTest",
    "Notes",
    "Offload",
    "OneCycle",
    "Optimizer",
    "Scheduler",
    "TorchAutocast",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOptimization",
    "hidden_size_of",
    "read_content",
]

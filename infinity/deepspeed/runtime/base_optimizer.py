"""Names of `deepspeed.runtime.base_optimizer`, for isinstance."""

from infinity.engine.optimizer import UnitOptimizer

DeepSpeedOptimizer = UnitOptimizer
ZeROOptimizer = UnitOptimizer

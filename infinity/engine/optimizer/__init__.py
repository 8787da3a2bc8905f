"""The public optimizer of a training engine, its state dicts, the loss scale and the norm of a gradient."""

from infinity.engine.optimizer.unit_optimizer import UnitOptimizer

__all__ = ["UnitOptimizer"]

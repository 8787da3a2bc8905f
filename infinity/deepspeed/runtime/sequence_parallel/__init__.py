"""Modules that scripts import from `deepspeed.runtime.sequence_parallel`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(__name__, "parallel_state_sp", "ulysses_sp")

"""Modules that scripts import from `deepspeed.ops`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(__name__, "adagrad", "adam", "aio", "lion", "op_builder")

"""Modules that scripts import from `deepspeed.checkpoint`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(__name__, "utils")

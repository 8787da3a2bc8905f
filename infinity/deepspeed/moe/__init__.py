"""Modules that scripts import from `deepspeed.moe`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(__name__, "experts", "layer", "mappings", "sharded_moe", "utils")

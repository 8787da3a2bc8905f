"""Modules that scripts import from `deepspeed.runtime.activation_checkpointing`."""

from infinity.deepspeed.lazy import submodules

__getattr__ = submodules(__name__, "checkpointing")

"""Modules that scripts import from `deepspeed.runtime.activation_checkpointing`."""

"""Modules that scripts import from `deepspeed.ops`."""

"""Modules that scripts import from `deepspeed.checkpoint`."""

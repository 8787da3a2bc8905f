"""Name of `deepspeed.add_config_arguments`."""

from infinity.engine.arguments import add_config_arguments

__all__ = ["add_config_arguments"]

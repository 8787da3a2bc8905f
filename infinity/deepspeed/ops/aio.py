"""`AsyncIOBuilder`."""

from infinity.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

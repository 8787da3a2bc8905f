"""Modules that scripts import from `deepspeed.ops`."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed.lazy import submodules

_submodules = submodules(__name__, "adagrad", "adam", "aio", "lion", "op_builder")


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":
        return _submodules("op_builder").compatible_ops
    return _submodules(name)

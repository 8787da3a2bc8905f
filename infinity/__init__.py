"""Infinity: train and run PyTorch models larger than the memory of the machine.

    engine, optimizer, dataloader, lr_scheduler = infinity.initialize(model=model, config="engine.json")
    loss = engine(batch); engine.backward(loss); engine.step()

Importing this package compiles nothing and imports torch only when an engine is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.access import (
        GatheredParameters,
        get_full_fp32_param,
        get_full_grad,
        get_full_optimizer_state,
        set_full_fp32_param,
        set_full_grad,
        set_full_optimizer_state,
    )
    from infinity.checkpoint.pretrained import load_pretrained
    from infinity.config import Config
    from infinity.construct import Init
    from infinity.engine import Engine
    from infinity.entry import init_inference, initialize
    from infinity.errors import InfinityError
    from infinity.inference import InferenceEngine

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Engine",
    "GatheredParameters",
    "InferenceEngine",
    "InfinityError",
    "Init",
    "get_full_fp32_param",
    "get_full_grad",
    "get_full_optimizer_state",
    "init_inference",
    "initialize",
    "load_pretrained",
    "set_full_fp32_param",
    "set_full_grad",
    "set_full_optimizer_state",
]

_HOMES = {
    "Config": "infinity.config",
    "Engine": "infinity.engine",
    "GatheredParameters": "infinity.access",
    "InferenceEngine": "infinity.inference",
    "InfinityError": "infinity.errors",
    "Init": "infinity.construct",
    "get_full_fp32_param": "infinity.access",
    "get_full_grad": "infinity.access",
    "get_full_optimizer_state": "infinity.access",
    "init_inference": "infinity.entry",
    "initialize": "infinity.entry",
    "load_pretrained": "infinity.checkpoint.pretrained",
    "set_full_fp32_param": "infinity.access",
    "set_full_grad": "infinity.access",
    "set_full_optimizer_state": "infinity.access",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""Infinity: train and run PyTorch models larger than the memory of the machine.

    engine, optimizer, dataloader, lr_scheduler = infinity.initialize(model=model, config="engine.json")
    loss = engine(batch); engine.backward(loss); engine.step()

Importing this package compiles nothing and imports torch only when an engine is made.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Engine",
    "GatheredParameters",
    "InferenceEngine",
    "InfinityError",
    "Init",
    "add_config_arguments",
    "get_full_fp32_param",
    "get_full_grad",
    "get_full_optimizer_state",
    "init_inference",
    "initialize",
    "load_pretrained",
    "set_full_fp32_param",
    "set_full_grad",
    "set_full_optimizer_state",
    "stream_weights",
]

# Types for checkers are in __init__.pyi, so that the root imports none of its rooms.
_HOMES = {
    "Config": "infinity.config.Config",
    "Engine": "infinity.engine.training.TrainingEngine",
    "GatheredParameters": "infinity.engine.gather.GatheredParameters",
    "InferenceEngine": "infinity.engine.inference.InferenceEngine",
    "InfinityError": "infinity.errors.InfinityError",
    "Init": "infinity.construction.init_context.Init",
    "add_config_arguments": "infinity.engine.arguments.add_config_arguments",
    "get_full_fp32_param": "infinity.engine.gather.get_full_fp32_param",
    "get_full_grad": "infinity.engine.gather.get_full_grad",
    "get_full_optimizer_state": "infinity.engine.gather.get_full_optimizer_state",
    "init_inference": "infinity.engine.initialize.init_inference",
    "initialize": "infinity.engine.initialize.initialize",
    "load_pretrained": "infinity.checkpoint.pretrained.load_pretrained",
    "set_full_fp32_param": "infinity.engine.gather.set_full_fp32_param",
    "set_full_grad": "infinity.engine.gather.set_full_grad",
    "set_full_optimizer_state": "infinity.engine.gather.set_full_optimizer_state",
    "stream_weights": "infinity.engine.stream.stream_weights",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "nn":
        return import_module("infinity.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].rpartition(".")
    return getattr(import_module(module), attribute)

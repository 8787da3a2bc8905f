"""Names and packages of DeepSpeed that have no counterpart.

Modules of parallelism can be imported, since libraries import them for isinstance: their names are placeholder
classes, which have no instances. Other names and packages are missing, with an error that names the alternative.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from infinity.errors import UsageError

_ABSENT = {
    "DeepSpeedHybridEngine": "engine.generate() runs the model that is being trained",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "replace_transformer_layer": "pass the model unchanged, since no kernels are injected",
    "compression": "use torchao",
    "monitor": "call engine.monitor.write_events()",
    "profiling": "set flops_profiler in the config",
    "sequence": "use torch.distributed.tensor.parallel",
    "OnDevice": "use `with torch.device('meta')`, or zero.Init",
}
"""DeepSpeed's names that have no counterpart → what to use instead."""


def alternative(name: str) -> str | None:
    """Return an error text with the alternative to `deepspeed.<name>`; None if the name is not one of DeepSpeed's."""
    if name not in _ABSENT:
        return None
    return f"deepspeed.{name} has no counterpart in Infinity: {_ABSENT[name]}"


class _Placeholder(type):
    """Type of placeholder classes and of classes derived from them, which libraries define when they are imported."""

    _refusal: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(cls._refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__}.{name} was read, and {cls._refusal}")


@cache
def placeholder(name: str, instead: str) -> type:
    """Return the placeholder class `name`, the same one for the same arguments. A call of it raises UsageError."""
    refusal = f"DeepSpeed's {name} has no counterpart in Infinity: {instead}"
    return _Placeholder(name, (), {"_refusal": refusal, "__doc__": f"Placeholder: {instead}."})


PIPELINE = "use torch.distributed.pipelining"
EXPERTS = "experts are trained as parameters of their block, without expert parallelism: pass the model as it is"
TENSOR_PARALLEL = "use torch.distributed.tensor.parallel, and pass process_group to infinity.initialize()"
SEQUENCE = "use torch.distributed.tensor.experimental.context_parallel"
KERNELS = "pass the model unchanged, since no kernels are injected"
TILES = (
    "call the module on chunks of the sequence under torch.utils.checkpoint, and concatenate; infinity.nn.TiledLinear "
    "splits the weights"
)

"""Names and packages of DeepSpeed that have no counterpart."""

from __future__ import annotations

_ABSENT = {
    "PipelineModule": "use torch.distributed.pipelining",
    "PipelineEngine": "use torch.distributed.pipelining",
    "pipe": "use torch.distributed.pipelining",
    "moe": "experts are trained as parameters of their block, without expert parallelism",
    "DeepSpeedHybridEngine": "engine.generate() runs the model that is being trained",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "tp_model_init": "use torch.distributed.tensor.parallel",
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

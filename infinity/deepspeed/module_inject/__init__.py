"""Modules and placeholders of `deepspeed.module_inject`, which replaces layers in DeepSpeed."""

from infinity.deepspeed.absent import placeholders
from infinity.deepspeed.lazy import first_of, submodules

__getattr__ = first_of(
    submodules(__name__, "layers"),
    placeholders(
        __name__,
        "pass the model unchanged, since no kernels are injected",
        ("replace_transformer_layer", "revert_transformer_layer", "quantize_transformer_layer", "DSPolicy"),
    ),
)

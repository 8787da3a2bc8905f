"""Names of `deepspeed.module_inject.layers`: no layer of a model is replaced."""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.deepspeed.absent import TENSOR_PARALLEL, placeholders

__getattr__ = placeholders(
    __name__,
    TENSOR_PARALLEL,
    ("LinearAllreduce", "LinearLayer", "LmHeadLinearAllreduce", "TensorParallel_Layer", "set_autotp_mode"),
)


class GatherReplacedLayerParams:
    """A block without effect: it gathers parameters of replaced layers, of which there are none."""

    def __init__(self, params: Any, module: nn.Module, enabled: bool = True) -> None:
        self.module = module
        self.enabled = False
        """As in DeepSpeed for parameters of layers that are not replaced."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

"""Builders of DeepSpeed's operators. Infinity's are compiled with the package, so `load` compiles nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar, NoReturn

from infinity.deepspeed import aio_handle
from infinity.errors import UsageError


class AsyncIOBuilder:
    """`load()` returns the module with `aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> ModuleType:
        return aio_handle


class GDSBuilder:
    """GPUDirect Storage, which Infinity does not have. `load` raises UsageError."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        return False

    def load(self, verbose: bool = False) -> ModuleType:
        raise UsageError(
            "GPUDirect Storage (gds_handle) has no counterpart here: use AsyncIOBuilder, whose aio_handle reads and "
            "writes CUDA tensors through pinned memory"
        )


class _OfOptimizer:
    """An optimizer's kernels, which are compiled with the package or torch's. `load` raises UsageError."""

    NAME: ClassVar[str]
    CLASS: ClassVar[str]
    """The class below `deepspeed.ops` that uses them."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> NoReturn:
        raise UsageError(f"{type(self).__name__}().load() has no counterpart here: use deepspeed.ops.{self.CLASS}")


def _of_optimizer(builder: str, name: str, used_by: str) -> type[_OfOptimizer]:
    return type(builder, (_OfOptimizer,), {"__module__": __name__, "NAME": name, "CLASS": used_by})


CPUAdamBuilder = _of_optimizer("CPUAdamBuilder", "cpu_adam", "adam.DeepSpeedCPUAdam")
CPUAdagradBuilder = _of_optimizer("CPUAdagradBuilder", "cpu_adagrad", "adagrad.DeepSpeedCPUAdagrad")
CPULionBuilder = _of_optimizer("CPULionBuilder", "cpu_lion", "lion.DeepSpeedCPULion")
FusedAdamBuilder = _of_optimizer("FusedAdamBuilder", "fused_adam", "adam.FusedAdam")
FusedLionBuilder = _of_optimizer("FusedLionBuilder", "fused_lion", "lion.FusedLion")

ALL_OPS: dict[str, type[Any]] = {
    builder.NAME: builder
    for builder in (
        AsyncIOBuilder,
        CPUAdagradBuilder,
        CPUAdamBuilder,
        CPULionBuilder,
        FusedAdamBuilder,
        FusedLionBuilder,
        GDSBuilder,
    )
}
"""Name → builder."""

_ABSENT_OPS = (
    "cutlass_ops",
    "dc",
    "deepspeed_ccl_comm",
    "deepspeed_not_implemented",
    "deepspeed_shm_comm",
    "evoformer_attn",
    "fp_quantizer",
    "fused_lamb",
    "inference_core_ops",
    "pin_memory",
    "quantizer",
    "ragged_device_ops",
    "ragged_ops",
    "random_ltd",
    "sparse_attn",
    "spatial_inference",
    "stochastic_transformer",
    "transformer",
    "transformer_inference",
    "utils",
)
compatible_ops = dict.fromkeys(_ABSENT_OPS, False) | {
    name: builder().is_compatible() for name, builder in ALL_OPS.items()
}
"""DeepSpeed's name of an operator → True if it has a counterpart here."""


def __getattr__(name: str) -> Any:
    if name.endswith("Builder"):
        raise AttributeError(
            f"op_builder.{name} has no counterpart here: optimizers are classes of deepspeed.ops.adam, lion and "
            "adagrad, and other operators are torch's"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

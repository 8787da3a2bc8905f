"""The configuration: its top level, and the sections on dtypes, placement, I/O and the engine.

Each key is declared once, here or in `optimization`, with its type, default, bounds and documentation. docs/config.md
is generated from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from infinity.config.batch import Batch, resolve_batch
from infinity.config.fields import (
    Count,
    CountOrZero,
    DType,
    Folders,
    Number,
    Positive,
    Section,
    Size,
    SizeOrZero,
    Switch,
    Threads,
)
from infinity.config.load import load_config
from infinity.config.optimization import AdamW, Optimizer, Scheduler
from infinity.sizes import parse_size

ALIGNMENT = 4096
"""Alignment of direct I/O in bytes, and of update tiles in elements."""


class BF16(Section):
    """Training in bfloat16."""

    enabled: Switch = False
    """Store and compute with bfloat16 parameters. The optimizer updates fp32 values (see `infinity.master`) and stores
    its moments in the format of `infinity.moments`."""


class FP16(Section):
    """Training in float16, with a loss scale."""

    enabled: Switch = False
    """Store and compute with float16 parameters, with an fp32 master of each. The loss is scaled, and a step whose
    gradients overflow is skipped. bf16 needs neither; use fp16 on devices without bf16."""

    loss_scale: Number = 0.0
    """Constant factor of the loss; 0: dynamic loss scaling, set by the next keys."""

    initial_scale_power: CountOrZero = Field(default=16, le=126)
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: Count = 1000
    """Steps without overflow after which the scale is doubled."""

    hysteresis: Count = 2
    """Overflows before the scale is halved; the count restarts whenever the scale is doubled."""

    consecutive_hysteresis: Switch = False
    """true: the count of `hysteresis` restarts after every step without overflow."""

    min_loss_scale: Positive = 1.0
    """Lower bound of the scale; training stops with an error when 20 steps in a row overflow at it."""


class DataTypes(Section):
    """Dtypes in which values are accumulated."""

    grad_accum_dtype: DType = "fp32"
    """Dtype in which gradients are accumulated over the micro-batches of a step; unused with one micro-batch. `fp16`
    requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""


class Offload(Section):
    """Tier of one kind of state."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`none`: on the device that computes; `cpu`: in host memory; `nvme`: in files under `nvme_path`."""

    nvme_path: Folders | None = Field(default=None, validate_default=True)
    """Folder on a local disk for the files of device `nvme`, or a list of folders on several drives. States are striped
    over the folders, so that the drives' bandwidths add up. Unused for other devices."""

    pin_memory: Switch = True
    """Pin the host memory of these states, for asynchronous copies to a CUDA device. If pinning fails, pageable memory
    is used and one warning is logged."""

    @field_validator("nvme_path")
    @classmethod
    def _nvme_needs_a_folder(cls, value: tuple[Path, ...] | None, info: ValidationInfo) -> tuple[Path, ...] | None:
        if value is None and info.data.get("device") == "nvme":
            raise ValueError(
                'is missing: device "nvme" needs a folder on a local disk, such as "nvme_path": "/local_nvme"'
            )
        return value


class ZeroOptimization(Section):
    """Sharding and tiers of states."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage, the states sharded over ranks. 0: none; 1: optimizer states; 2: and gradients; 3: and parameters.
    Parameters may be offloaded in stage 3 only; below it, they stay on the device that computes."""

    offload_param: Offload = Offload()
    """Tier of the parameters."""

    offload_optimizer: Offload = Offload()
    """Tier of the optimizer states, and of gradients until their update."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders over which all files are striped; empty if no state is on nvme."""
        return next(iter(self._paths_on_nvme()), ())

    def _paths_on_nvme(self) -> list[tuple[Path, ...]]:
        sections = (self.offload_param, self.offload_optimizer)
        return [section.nvme_path or () for section in sections if section.device == "nvme"]

    @model_validator(mode="after")
    def _parameters_leave_in_stage_3_only(self) -> ZeroOptimization:
        if self.stage < 3 and self.offload_param.device != "none":
            raise ValueError(
                f'offload_param.device is "{self.offload_param.device}", but in stage {self.stage} all parameters stay '
                "on the device that computes: use stage 3, or leave offload_param out"
            )
        return self

    @model_validator(mode="after")
    def _one_set_of_folders(self) -> ZeroOptimization:
        if len(set(self._paths_on_nvme())) > 1:
            raise ValueError(
                "offload_param.nvme_path and offload_optimizer.nvme_path differ, but all states share their folders: "
                "set both to the same folders in the same order"
            )
        return self


class Aio(Section):
    """File I/O."""

    block_size: Size = Field(default=1 << 20, le=1 << 30)
    """Largest request in bytes, a multiple of 4096 up to 1 GiB; longer transfers are split."""

    queue_depth: Count = Field(default=32, le=65536)
    """Requests in flight per thread."""

    intra_op_parallelism: Threads = 1
    """Threads that submit requests, for each folder in `nvme_path`."""

    thread_count: Threads | None = None
    """Alias of `intra_op_parallelism`; set only one of the two."""

    single_submit: Switch = False
    """Accepted for compatibility: requests are always submitted in batches, and true is an error."""

    overlap_events: Switch = True
    """Accepted for compatibility: completions always overlap submission, and false is an error."""

    engine: Literal["auto", "libaio", "io_uring"] = "auto"
    """Kernel interface of the requests. `libaio`: Linux AIO; `io_uring`: an error at start if the kernel forbids it;
    `auto`: the faster one that the kernel allows. `infinity report` shows the selected one."""

    checksum: Switch = False
    """Keep a checksum of every written block in host memory, and verify every read. If a drive returns other bytes than
    were written, the read raises an error with their location."""

    @property
    def threads(self) -> int:
        """Threads per folder, from either name of the key."""
        return self.intra_op_parallelism if self.thread_count is None else self.thread_count

    @field_validator("block_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        return _multiple(value, "bytes")

    @field_validator("single_submit")
    @classmethod
    def _always_in_batches(cls, value: bool) -> bool:
        if value:
            raise ValueError("must be false: requests are always submitted in batches, which is faster than one by one")
        return value

    @field_validator("overlap_events")
    @classmethod
    def _always_overlapping(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "must be true: completions always overlap submission, which is faster than one after the other"
            )
        return value

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Aio:
        both_set = self.model_fields_set >= {"thread_count", "intra_op_parallelism"} and self.thread_count is not None
        if both_set and self.thread_count != self.intra_op_parallelism:
            raise ValueError(
                f"thread_count ({self.thread_count}) is an alias of intra_op_parallelism "
                f"({self.intra_op_parallelism}), and they differ: set only one of them"
            )
        return self


class Infinity(Section):
    """Keys that DeepSpeed does not have."""

    unit_size: Size = 64 << 20
    """Largest part of the model, in bytes of parameters, that becomes one unit. Repeated blocks are units of their own.
    Layers below a 64th of it join the unit of their parent."""

    prefetch_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters fetched ahead of their use. `auto`: four times the largest unit; 0: no prefetching."""

    cache_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters cached on the device that computes, in addition to those prefetched. Cached units are not
    read again in every pass. `auto`: all units if they fit in 16 MiB, else none."""

    tile_size: Count = 1 << 20
    """Elements that the update reads, computes and writes at a time, a multiple of 4096."""

    update: Literal["auto", "during_backward", "after_backward", "next_forward"] = "auto"
    """When units are updated. `during_backward`: each unit once its gradient is complete (not with clipping);
    `after_backward`: all units before `step()` returns; `next_forward`: each unit before its next use. All give the
    same results. `auto`: `during_backward`, or `next_forward` with clipping."""

    master: Literal["remainder", "fp32"] = "remainder"
    """Format of the fp32 master of a bfloat16 parameter. `remainder`: only the low 16 bits, which the parameter lacks;
    `fp32`: a separate copy, 2 bytes more per parameter to store, read and write. Masters of float16 parameters are
    always `fp32`."""

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Format of the optimizer's moments: 4, 2 or 1 bytes per element to store, read and write. `bf16` and `8bit` (with
    one scale per 256 elements) are rounded stochastically; docs/optimizer.md gives the effect on the loss."""

    seed: CountOrZero = Field(default=0, lt=1 << 64)
    """Seed of the stochastic rounding of `moments`. The rounding depends only on this, the number of the step and the
    position of a parameter in the model."""

    adam_threads: CountOrZero = Field(default=0, le=1024)
    """Threads of the update on the CPU; 0: one per core that the process may use."""

    check_nan: Switch = True
    """Stop with an error if the loss, the gradient norm or a gradient is NaN or infinite, before it is used."""

    debug: Switch = False
    """Expose lifetime errors: released buffers are filled with NaN and reused in the order of their release, and pools
    hold no more buffers than needed."""

    @field_validator("prefetch_bytes", "cache_bytes", mode="before")
    @classmethod
    def _size_or_auto(cls, value: object) -> object:
        # Outside the union, so that an invalid size gives one problem instead of one for each member.
        return value if value == "auto" else parse_size(value)  # type: ignore[arg-type]

    @field_validator("tile_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        return _multiple(value, "elements")


class Config(Section):
    """The whole configuration; `Config.load` reads it from a dict or a JSON file."""

    train_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; by default derived from the next two."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward pass of one rank; derived by default."""

    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes of one optimizer step; by default derived from the two above, or 1."""

    gradient_clipping: Number = 0.0
    """Largest norm of the whole gradient; gradients of larger norm are scaled down to it. 0: no clipping."""

    steps_per_print: CountOrZero = 10
    """Optimizer steps between progress lines; 0: none."""

    bf16: BF16 = BF16()
    """Training in bfloat16."""

    fp16: FP16 = FP16()
    """Training in float16, with a loss scale."""

    communication_data_type: DType | None = None
    """Dtype in which gradients are reduced over ranks. By default fp32 on gloo, and the parameters' dtype on NCCL.
    `fp16` requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""

    data_types: DataTypes = DataTypes()
    """Dtypes in which values are accumulated."""

    optimizer: Optimizer = AdamW()
    """The optimizer and its constants."""

    scheduler: Scheduler | None = None
    """The learning rate's schedule; by default the rate is constant."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """Sharding and tiers of states."""

    aio: Aio = Aio()
    """File I/O."""

    infinity: Infinity = Infinity()
    """Keys that DeepSpeed does not have."""

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | Path) -> Config:
        """Return the configuration in a dict or in the JSON file at a path; a Config is returned unchanged.

        Raises ConfigError with one line for each problem.
        """
        return source if isinstance(source, Config) else load_config(cls, source)

    def resolve_batch(self, world_size: int) -> Batch:
        """Return the batch sizes for `world_size` ranks; see `infinity.config.batch.resolve_batch`."""
        return resolve_batch(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, world_size
        )

    @model_validator(mode="after")
    def _one_16_bit_type(self) -> Config:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16 and fp16 are both enabled: choose one")
        return self

    @model_validator(mode="after")
    def _fp16_needs_a_loss_scale(self) -> Config:
        sums = {
            "communication_data_type": self.communication_data_type,
            "data_types.grad_accum_dtype": self.data_types.grad_accum_dtype,
        }
        for name, dtype in sums.items():
            if dtype == "fp16" and not self.fp16.enabled:
                raise ValueError(
                    f'{name} is "fp16", in which unscaled gradients underflow below 6e-8 and overflow above 65504: '
                    'use "bf16" or "fp32", or train with "fp16": {"enabled": true}'
                )
        return self

    @model_validator(mode="after")
    def _some_need_all_gradients(self) -> Config:
        for name, needs in (("gradient_clipping", self.gradient_clipping > 0), ("fp16", self.fp16.enabled)):
            if needs and self.infinity.update == "during_backward":
                raise ValueError(
                    f'infinity.update is "during_backward", but {name} needs the norm of all gradients before the '
                    f'first update: use "auto", "next_forward" or "after_backward", or remove {name}'
                )
        return self


def _multiple(value: int, of: str) -> int:
    if value % ALIGNMENT:
        below = value // ALIGNMENT * ALIGNMENT
        raise ValueError(f"must be a multiple of {ALIGNMENT} {of}, such as {below or ALIGNMENT}")
    return value

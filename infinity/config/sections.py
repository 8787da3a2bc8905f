"""The configuration: its top level, and the sections on I/O and the engine.

Each key is declared once, here or in `precision`, `zero`, `optimization` and `monitors`, with its type, default, bounds
and documentation. docs/config.md is generated from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from infinity.config.auto import Fill
from infinity.config.batch import Batch, resolve_batch
from infinity.config.fields import (
    Count,
    CountOrZero,
    DType,
    Number,
    Section,
    Size,
    SizeOrZero,
    Switch,
    Threads,
    show,
)
from infinity.config.load import load_config
from infinity.config.monitors import CSVMonitor, FlopsProfiler, TensorBoard, WandB
from infinity.config.notes import Dialect, Notes
from infinity.config.optimization import AdamW, Optimizer, Scheduler
from infinity.config.precision import BF16, FP16, DataTypes, TorchAutocast
from infinity.config.zero import ZeroOptimization
from infinity.sizes import parse_size

ALIGNMENT = 4096
"""Alignment of direct I/O in bytes, and of update tiles in elements."""


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

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Aio:
        both_set = self.model_fields_set >= {"thread_count", "intra_op_parallelism"} and self.thread_count is not None
        if both_set and self.thread_count != self.intra_op_parallelism:
            raise ValueError(
                f"thread_count ({self.thread_count}) is an alias of intra_op_parallelism "
                f"({self.intra_op_parallelism}), and they differ: set only one of them"
            )
        return self


class Memory(Section):
    """Budgets of memory. A node's `host` and `nvme` are divided over its ranks.

    States fill `host` before nvme: `offload_param` and `offload_optimizer` with the device nvme name the slowest memory
    that they may use. A placement never changes a result."""

    device: Size | None = None
    """Bytes of device memory for this engine and the model's activations; by default all of it. On an accelerator,
    torch may allocate no more. On the CPU, the limit holds for buffers of units and gradients and for states of offload
    device `none`, not for activations. `unit_size: auto` is at most a 16th of it, or 64MiB if that is more.
    `prefetch_bytes: auto` leaves half of the memory without states and gradients to activations."""

    host: Literal["auto"] | Size | None = None
    """Bytes of a node's host memory for states and buffers. States that `offload_*` places on nvme stay in memory as
    far as there is room: first parameters, then gradients that wait, then optimizer states. A plan that needs more is
    refused. On the CPU, buffers of units and gradients count, activations do not. `auto`: the free memory less an
    eighth and 1 GiB; half of it on the CPU, which needs the rest for activations. By default, states stay where
    `offload_*` places them."""

    host_params: CountOrZero | None = None
    """Parameters of each rank that stay in host memory although `offload_param` places them on nvme, in elements. With
    `host`, at most as many as that has room for."""

    nvme: Literal["auto"] | Size | None = None
    """Bytes of a node's `nvme_path` for states; a plan that needs more is refused. `auto`: the free space less 5 %. By
    default, all of it."""


class Infinity(Section):
    """Keys that DeepSpeed does not have."""

    memory: Memory = Memory.model_construct()
    """Limits on memory."""

    unit_size: Literal["auto"] | Size = "auto"
    """Largest part of the model, in bytes of parameters, that becomes one unit. Repeated blocks are units of their own.
    Layers below a 64th of it join the unit of their parent. `auto`: 64MiB on the CPU; on a device with memory of its
    own, or with `memory.device`, the largest repeated block, if it is larger, up to a 16th of that memory."""

    prefetch_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters fetched ahead of their use. `auto`: the next four units, or as many as a repeated block has
    if that is more; fewer if their buffers exceed half of the device memory that states and gradients leave. 0: no
    prefetching."""

    read_ahead_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters on nvme that are read into host memory before a buffer on the GPU is free for them. `auto`:
    twice the largest unit's shard; 0: none. No effect on a CPU, which computes in these buffers."""

    cache_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters cached on the device that computes, in addition to those prefetched. Cached units are not
    read again in every pass. `auto`: all units if they fit in 16 MiB, else none."""

    tile_size: Literal["auto"] | Count = "auto"
    """Elements that the update reads, computes and writes at a time, a multiple of 4096. `auto`: 1048576 with the
    optimizer's states on nvme; a whole unit with states in memory, where tiles need no buffers."""

    update: Literal["auto", "during_backward", "after_backward", "next_forward"] = "auto"
    """When units are updated. `during_backward`: each unit once its gradient is complete (an error with clipping or a
    loss scale); `after_backward`: all units before `step()` returns; `next_forward`: each unit before its next use. All
    give the same results. `auto`: `during_backward`, or `next_forward` with clipping or a loss scale."""

    accumulation_buffers: Switch = False
    """Allocate buffers for the sum of several micro-batches' gradients although `gradient_accumulation_steps` is 1, so
    that `engine.no_sync()` and `engine.set_gradient_accumulation_boundary(False)` work. Needed only if gradients are
    stored in less than `data_types.grad_accum_dtype`; an error says so. In stages 0 and 1 gradients are then reduced
    once per step."""

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
    """Threads of the update on the CPU; 0: one per processor that the process may use. Ranks of one machine share its
    processors. Beside a GPU, three processors of a rank are left to the threads that feed the GPU."""

    norm_of: Literal["model", "optimizer"] = "model"
    """Gradients in the norm of `gradient_clipping`, if some trainable parameters are in no group of the optimizer.
    `model`: of all trainable parameters, as `clip_grad_norm_(model.parameters())`; `optimizer`: of those in its groups,
    as DeepSpeed does in stages 1 to 3 and with 16-bit parameters, and Lightning."""

    check_nan: Switch = True
    """Stop with an error if the loss, the gradient norm or a gradient is NaN or infinite, before it is used. With a
    loss scale the step is skipped instead."""

    strict: Switch = False
    """Refuse keys of DeepSpeed that have no effect here. By default a line of the log lists them."""

    debug: Switch = False
    """Expose lifetime errors: released buffers are filled with NaN and reused in the order of their release, and pools
    hold no more buffers than needed."""

    @field_validator("prefetch_bytes", "read_ahead_bytes", "cache_bytes", mode="before")
    @classmethod
    def _size_or_auto(cls, value: object) -> object:
        # Outside the union, so that an invalid size gives one problem instead of one for each member.
        return value if value == "auto" else parse_size(value)  # type: ignore[arg-type]

    @field_validator("unit_size", mode="before")
    @classmethod
    def _unit_size(cls, value: object) -> object:
        size = cls._size_or_auto(value)
        if size == 0:
            raise ValueError("must be more than 0, not 0")
        return size

    @field_validator("tile_size", mode="before")
    @classmethod
    def _count_or_auto(cls, value: object) -> object:
        # Outside the union, for the reason above.
        if value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
            raise ValueError(f'must be a whole number of elements from 1, or "auto", not {show(value)}')
        return _multiple(int(value), "elements")


class Config(Section):
    """The whole configuration; `Config.load` reads it from a dict or a JSON file."""

    train_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; by default derived from the next two."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward pass of one rank; derived by default."""

    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes of one optimizer step; by default derived from the two above, or 1."""

    managed_gradient_accumulation: Switch = True
    """`step()` updates after `gradient_accumulation_steps` backward passes. false: every `step()` updates, with the
    gradients of all backward passes since the last one. `engine.backward` divides by `gradient_accumulation_steps` in
    either case."""

    dataloader_drop_last: Switch = True
    """The dataloader of `training_data` drops the last batch if it is incomplete. false: the last batch is smaller,
    and ranks repeat samples so that all have equally many. DeepSpeed's default is false."""

    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Reduction of gradients over ranks. Clipping and the gradient norm see its result."""

    gradient_clipping: Number = 0.0
    """Largest norm of the whole gradient; gradients of larger norm are scaled down to it. 0: no clipping."""

    steps_per_print: CountOrZero = 10
    """Optimizer steps between progress lines; 0: none."""

    wall_clock_breakdown: Switch = False
    """Log the seconds of forward, backward and step, every `steps_per_print` steps, or every step if that is 0."""

    bf16: BF16 = BF16.model_construct()
    """Training in bfloat16."""

    fp16: FP16 = FP16.model_construct()
    """Training in float16, with a loss scale."""

    torch_autocast: TorchAutocast = TorchAutocast.model_construct()
    """PyTorch's autocast around the forward pass."""

    communication_data_type: DType | None = None
    """Dtype in which gradients are reduced over ranks. By default fp32 on gloo, and the parameters' dtype on NCCL.
    `fp16` requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""

    data_types: DataTypes = DataTypes.model_construct()
    """Dtypes in which values are stored and accumulated."""

    optimizer: Optimizer = AdamW.model_construct()
    """The optimizer and its constants."""

    scheduler: Scheduler | None = None
    """The learning rate's schedule; by default the rate is constant."""

    zero_optimization: ZeroOptimization = ZeroOptimization.model_construct()
    """Sharding and tiers of states."""

    aio: Aio = Aio.model_construct()
    """File I/O."""

    tensorboard: TensorBoard = TensorBoard.model_construct()
    """TensorBoard."""

    wandb: WandB = WandB.model_construct()
    """Weights & Biases."""

    csv_monitor: CSVMonitor = CSVMonitor.model_construct()
    """Files of comma-separated values."""

    flops_profiler: FlopsProfiler = FlopsProfiler.model_construct()
    """Count of the operations of one forward."""

    infinity: Infinity = Infinity.model_construct()
    """Keys that DeepSpeed does not have."""

    _notes: Notes = PrivateAttr(default_factory=Notes)

    @classmethod
    def load(
        cls,
        source: Config | Mapping[str, Any] | str | Path,
        *,
        dialect: Dialect = "infinity",
        fill: Fill | None = None,
    ) -> Config:
        """Return the configuration in a dict or in the JSON file at a path; a Config is returned unchanged.

        dialect: "deepspeed" gives absent keys DeepSpeed's defaults and its meaning of `Adam`. fill: values for keys
        that are "auto". Keys of DeepSpeed that were mapped or have no effect are listed in `notes`.

        Raises ConfigError with one line for each problem.
        """
        if isinstance(source, Config):
            return source
        config, notes = load_config(cls, source, dialect, fill or Fill())
        config._notes = notes
        return config

    @property
    def notes(self) -> Notes:
        """Keys of DeepSpeed that were mapped to others or have no effect, and unresolved "auto" values."""
        return self._notes

    def resolve_batch(self, world_size: int) -> Batch:
        """Return the batch sizes for `world_size` ranks; see `infinity.config.batch.resolve_batch`."""
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
            auto=self.notes.defaults,
        )

    @property
    def scales_loss(self) -> bool:
        """True if gradients are computed in float16, which needs a loss scale."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    @model_validator(mode="after")
    def _one_16_bit_type(self) -> Config:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16 and fp16 are both enabled: choose one")
        autocast = self.torch_autocast
        if autocast.enabled and (self.fp16.enabled or (self.bf16.enabled and autocast.dtype == "fp16")):
            other = "fp16" if self.fp16.enabled else "bf16"
            raise ValueError(
                f'torch_autocast with dtype "{autocast.dtype}" and {other} are both enabled: choose one. '
                "torch_autocast keeps the parameters in fp32"
            )
        return self

    @model_validator(mode="after")
    def _parameters_have_the_enabled_dtype(self) -> Config:
        dtype = self.data_types.param_dtype
        enabled = "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"
        if dtype not in (None, enabled):
            raise ValueError(
                f'data_types.param_dtype is "{dtype}", but bf16 and fp16 make it "{enabled}": leave it out, or enable '
                "the section of that dtype"
            )
        return self

    @model_validator(mode="after")
    def _fp16_needs_a_loss_scale(self) -> Config:
        sums = {
            "communication_data_type": self.communication_data_type,
            "data_types.grad_accum_dtype": self.data_types.grad_accum_dtype,
        }
        for name, dtype in sums.items():
            if dtype == "fp16" and not self.scales_loss:
                raise ValueError(
                    f'{name} is "fp16", in which unscaled gradients underflow below 6e-8 and overflow above 65504: '
                    'use "bf16" or "fp32", or train with "fp16": {"enabled": true}'
                )
        return self

    @model_validator(mode="after")
    def _some_need_all_gradients(self) -> Config:
        for name, needs in (("gradient_clipping", self.gradient_clipping > 0), ("fp16", self.scales_loss)):
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

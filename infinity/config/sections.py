"""The configuration: its top level, and the sections about where states live and how they move.

A key is declared here (or in `optimization`) once; its type, default, bounds and documentation stand beside it, and
docs/config.md is generated from them.
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
"""Bytes that direct I/O aligns to, and elements that tiles of an update are multiples of."""


class BF16(Section):
    """Training in bfloat16."""

    enabled: Switch = False
    """Keep and compute with bfloat16 parameters; the optimizer updates their exact values (`infinity.master`) and keeps
    its moments as `infinity.moments` says."""


class FP16(Section):
    """Training in float16, with a loss scale."""

    enabled: Switch = False
    """Keep and compute with float16 parameters, beside an fp32 master of each; the loss is scaled, and a step whose
    gradients overflow is skipped. bf16 needs neither; use fp16 on devices without it."""

    loss_scale: Number = 0.0
    """What the loss is multiplied by; 0: found while training, by the next keys."""

    initial_scale_power: CountOrZero = Field(default=16, le=126)
    """The scale begins at 2 to this power."""

    loss_scale_window: Count = 1000
    """Steps without overflow after which the scale is doubled."""

    hysteresis: Count = 2
    """Overflows that the scale endures before it is halved; counted anew whenever it is doubled."""

    consecutive_hysteresis: Switch = False
    """true: every step without overflow lets the count of `hysteresis` begin anew."""

    min_loss_scale: Positive = 1.0
    """The scale is not halved below this; training stops with an error when 20 steps in a row overflow there."""


class DataTypes(Section):
    """What values are kept in while they are summed."""

    grad_accum_dtype: DType = "fp32"
    """What gradients are summed in over the micro-batches of a step; unused with one micro-batch a step. `fp16` (or
    `float16`, and so on) needs fp16 training, for its loss scale."""


class Offload(Section):
    """Where one kind of state lives."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`none`: on the device that computes; `cpu`: in host memory; `nvme`: in files under `nvme_path`."""

    nvme_path: Folders | None = Field(default=None, validate_default=True)
    """Folder for the files of device `nvme`, on a local disk, or a list of folders on several: states are striped over
    them, so that the drives' rates add. Unused for the other devices."""

    pin_memory: Switch = True
    """Pin the host memory of these states, so that a CUDA device copies asynchronously; falls back with one warning."""

    @field_validator("nvme_path")
    @classmethod
    def _nvme_needs_a_folder(cls, value: tuple[Path, ...] | None, info: ValidationInfo) -> tuple[Path, ...] | None:
        if value is None and info.data.get("device") == "nvme":
            raise ValueError('is missing: device "nvme" needs a folder on a local disk, as "nvme_path": "/local_nvme"')
        return value


class ZeroOptimization(Section):
    """How states are sharded and where they live."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is sharded over the ranks. 0: nothing; 1: the optimizer states; 2: gradients too; 3: parameters too, which
    may then live on any device. Below 3 they stay where the model computes."""

    offload_param: Offload = Offload()
    """Where the parameters live."""

    offload_optimizer: Offload = Offload()
    """Where the optimizer states live, and the gradients that wait for their update."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders of all files, over which they are striped; empty when nothing lives on nvme."""
        return next(iter(self._paths_on_nvme()), ())

    def _paths_on_nvme(self) -> list[tuple[Path, ...]]:
        sections = (self.offload_param, self.offload_optimizer)
        return [section.nvme_path or () for section in sections if section.device == "nvme"]

    @model_validator(mode="after")
    def _parameters_leave_in_stage_3_only(self) -> ZeroOptimization:
        if self.stage < 3 and self.offload_param.device != "none":
            raise ValueError(
                f'offload_param.device is "{self.offload_param.device}", but in stage {self.stage} all parameters stay '
                "where the model computes: use stage 3, or leave offload_param out"
            )
        return self

    @model_validator(mode="after")
    def _one_set_of_folders(self) -> ZeroOptimization:
        if len(set(self._paths_on_nvme())) > 1:
            raise ValueError(
                "offload_param.nvme_path and offload_optimizer.nvme_path differ; all states share their folders for "
                "now: give both the same, in the same order"
            )
        return self


class Aio(Section):
    """Reading and writing files."""

    block_size: Size = Field(default=1 << 20, le=1 << 30)
    """Largest single request in bytes, a multiple of 4096 up to 1 GiB; longer transfers are split."""

    queue_depth: Count = Field(default=32, le=65536)
    """Requests in flight per thread."""

    intra_op_parallelism: Threads = 1
    """Threads that submit requests, for each path of `nvme_path`."""

    thread_count: Threads | None = None
    """Another name of `intra_op_parallelism`; only one of the two is needed."""

    single_submit: Switch = False
    """false: requests are submitted in batches, as they always are here; true is refused."""

    overlap_events: Switch = True
    """true: completions are taken while requests are submitted, as they always are here; false is refused."""

    engine: Literal["auto", "libaio", "io_uring"] = "auto"
    """How requests reach the kernel: `libaio`, Linux AIO; `io_uring`, an error at start where the kernel forbids it;
    `auto`: the better one of those that the kernel allows. `infinity report` shows which."""

    checksum: Switch = False
    """Keep a checksum of every block written to a file, in host memory, and verify it with every read: a drive that
    returns other bytes than were written is an error that names them, and never a wrong result."""

    @property
    def threads(self) -> int:
        """Threads for each path, by whichever name they were given."""
        return self.intra_op_parallelism if self.thread_count is None else self.thread_count

    @field_validator("block_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        return _multiple(value, "bytes")

    @field_validator("single_submit")
    @classmethod
    def _always_in_batches(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "must be false: requests are always submitted in batches, and one by one would only be slower"
            )
        return value

    @field_validator("overlap_events")
    @classmethod
    def _always_overlapping(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "must be true: completions always overlap submission, and one after the other would only be slower"
            )
        return value

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Aio:
        given = self.model_fields_set >= {"thread_count", "intra_op_parallelism"} and self.thread_count is not None
        if given and self.thread_count != self.intra_op_parallelism:
            raise ValueError(
                f"thread_count ({self.thread_count}) is another name of intra_op_parallelism "
                f"({self.intra_op_parallelism}), and they differ: give one of them"
            )
        return self


class Infinity(Section):
    """Keys that only this engine has."""

    unit_size: Size = 64 << 20
    """A part of the model up to this many bytes of parameters becomes one unit; repeated blocks are always units."""

    prefetch_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters fetched ahead of their use; `auto`: four of the largest unit; 0: fetched when used."""

    cache_bytes: Literal["auto"] | SizeOrZero = "auto"
    """Bytes of parameters that stay where the model computes, besides those fetched ahead: as many units as fit are not
    read again in every pass. `auto`: all units if they fit in 16 MiB, else none."""

    tile_size: Count = 1 << 20
    """Elements that the update reads, computes and writes at a time, a multiple of 4096."""

    update: Literal["auto", "during_backward", "after_backward", "next_forward"] = "auto"
    """When units are updated. `during_backward`: each as its gradient is complete (not with clipping);
    `after_backward`: all before `step()` returns; `next_forward`: each before its next use. The results are the same.
    `auto`: during backward, or with clipping in the next forward."""

    master: Literal["remainder", "fp32"] = "remainder"
    """What holds the exact value of a bfloat16 parameter: `remainder`, the 16 bits that it lacks; `fp32`, a copy of its
    own, which is 2 bytes more per parameter to hold, read and write. That of a float16 parameter is `fp32`."""

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How the optimizer's moments are kept: 4, 2 or 1 bytes each to hold, read and write. `bf16` and `8bit` (with one
    scale for each 256 elements) are rounded stochastically; docs/optimizer.md says what they cost in quality."""

    seed: CountOrZero = Field(default=0, lt=1 << 64)
    """Of the stochastic rounding of `moments`, which follows from this, the number of the step and the place of a
    parameter in the model, and from nothing else."""

    adam_threads: CountOrZero = Field(default=0, le=1024)
    """Threads of one update on the CPU; 0: as many as the process may use cores."""

    check_nan: Switch = True
    """Stop with an error when the loss, the gradient norm or a gradient is NaN or infinite, before it is used."""

    debug: Switch = False
    """Make lifetime errors show: a buffer given back is filled with NaN, the first given back is reused first, and
    pools hold no more buffers than needed."""

    @field_validator("prefetch_bytes", "cache_bytes", mode="before")
    @classmethod
    def _size_or_auto(cls, value: object) -> object:
        # Outside the union, so that a size that cannot be read gives one problem and not one for each member.
        return value if value == "auto" else parse_size(value)  # type: ignore[arg-type]

    @field_validator("tile_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        return _multiple(value, "elements")


class Config(Section):
    """The whole configuration; `Config.load` reads it from a dict or a JSON file."""

    train_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; derived from the next two when left out."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward pass of one rank; derived when left out."""

    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes of one optimizer step; derived when left out, 1 where nothing says otherwise."""

    gradient_clipping: Number = 0.0
    """Largest norm of the whole gradient; longer ones are scaled down to it. 0: no clipping."""

    steps_per_print: CountOrZero = 10
    """Optimizer steps from one line of progress to the next; 0: none."""

    bf16: BF16 = BF16()
    """Training in bfloat16."""

    fp16: FP16 = FP16()
    """Training in float16, with a loss scale."""

    communication_data_type: DType | None = None
    """What gradients are summed in over ranks, and so how many bytes of them are exchanged. Left out: fp32 on gloo, and
    what the parameters are in on NCCL. `fp16` (or `float16`, and so on) needs fp16 training, for its loss scale."""

    data_types: DataTypes = DataTypes()
    """What values are kept in while they are summed."""

    optimizer: Optimizer = AdamW()
    """Which optimizer, and its constants."""

    scheduler: Scheduler | None = None
    """How the learning rate changes from step to step; without it, it stays."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """How states are sharded and where they live."""

    aio: Aio = Aio()
    """Reading and writing files."""

    infinity: Infinity = Infinity()
    """Keys that only this engine has."""

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | Path) -> Config:
        """Read a dict, or the JSON file at a path; a Config is returned as it is.

        Raises ConfigError, with one line for each problem.
        """
        return source if isinstance(source, Config) else load_config(cls, source)

    def resolve_batch(self, world_size: int) -> Batch:
        """The batch sizes for `world_size` ranks; see `infinity.config.batch.resolve_batch`."""
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
                    f'{name} is "fp16", in which gradients without a loss scale vanish below 6e-8 and overflow above '
                    '65504: use "bf16" or "fp32", or train with "fp16": {"enabled": true}'
                )
        return self

    @model_validator(mode="after")
    def _some_need_all_gradients(self) -> Config:
        for name, needs in (("gradient_clipping", self.gradient_clipping > 0), ("fp16", self.fp16.enabled)):
            if needs and self.infinity.update == "during_backward":
                raise ValueError(
                    f'infinity.update is "during_backward", but {name} needs the norm of all gradients before the '
                    f'first update: use "auto", "next_forward" or "after_backward", or do without {name}'
                )
        return self


def _multiple(value: int, of: str) -> int:
    if value % ALIGNMENT:
        below = value // ALIGNMENT * ALIGNMENT
        raise ValueError(f"must be a multiple of {ALIGNMENT} {of}, such as {below or ALIGNMENT}")
    return value

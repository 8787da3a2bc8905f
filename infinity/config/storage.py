"""Sections `zero_optimization`, `infinity.activations` and `aio`: sharding, tiers, and file I/O."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from infinity.config.fields import Count, Folders, Section, Shares, Size, SizeOrAuto, Switch, Threads, aligned


class Offload(Section):
    """Tier of one kind of state."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`none`: on the device that computes; `cpu`: in host memory; `nvme`: in files under `nvme_path`."""

    nvme_path: Folders | None = Field(default=None, validate_default=True)
    """Folder on a local disk for the files of device `nvme`, or a list of folders on several drives. States are striped
    over the folders, so that the drives' bandwidths add up (`aio.shares`). Unused for other devices."""

    pin_memory: Switch = True
    """Pin the host memory that a CUDA device copies: parameters and stored gradients, if this is true in one of the
    two sections with device `cpu`. Optimizer states are updated on the host and not pinned. If pinning fails, pageable
    memory is used and one warning is logged."""

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
    """ZeRO stage: which states are sharded over ranks. 0: none; 1: optimizer states; 2: also gradients; 3: also
    parameters. Parameters may be offloaded in stage 3 only; below it, they stay on the device that computes. If
    optimizer states are on cpu, an accelerator's parameters are also in host memory, where updates change them."""

    offload_param: Offload = Offload.model_construct()
    """Tier of the parameters."""

    offload_optimizer: Offload = Offload.model_construct()
    """Tier of the optimizer states, and of gradients until their update."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders over which all files are striped; empty if no state is on nvme."""
        return next(iter(self._paths_on_nvme()), ())

    @property
    def durable_paths(self) -> tuple[Path, ...]:
        """The folders of durable states, of which none may lie on nvme: those of nvme, or else the first named."""
        named = (section.nvme_path for section in (self.offload_param, self.offload_optimizer) if section.nvme_path)
        return self.nvme_paths or next(named, ())

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


class Activations(Section):
    """Tier of the tensors that autograd saves between forward and backward, besides parameters.

    Moves are asynchronous and never change a result. Small tensors stay, and so do those that the model or the training
    loop keeps. Inputs of checkpointed blocks are saved tensors, too; tensors inside of these blocks are recomputed.
    Hooks of the user (`saved_tensors_hooks`, `save_on_cpu`) take precedence."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`none`: on the device that computes; `cpu`: in pinned host memory, without effect if the CPU computes; `nvme`: in
    files that grow as needed."""

    nvme_path: Folders | None = None
    """Folder or folders of device `nvme`, as in `zero_optimization.offload_param`. By default those of the states."""

    min_bytes: Size = 64 << 10
    """Bytes of the smallest tensor that is moved."""

    memory_bytes: SizeOrAuto = "auto"
    """Limit on the bytes of saved tensors on the device that computes: those saved last, those in transfer, and those
    that backward needs next. `auto`: eight times the largest one, at least 64MiB."""


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

    shares: Shares = "auto"
    """Shares of the folders in `nvme_path`. `auto`: by their speeds, which a start measures if they are on different
    file systems, in half a second, or about two if the speeds differ by more than 20 %; a folder with too little room
    gets less. `equal`; or a list: with `[3, 1]`, the first folder has three quarters of the bytes. A durable run keeps
    its measured shares."""

    checksum: Switch = False
    """Keep a checksum of every written block in host memory, and verify every read. A block that does not match is read
    once more. Right bytes are used, with a warning; wrong ones are an error with their location, which says whether the
    drive stored them. Off by default: a step on 2 cores takes 5 to 10 % longer (docs/io.md)."""

    @property
    def threads(self) -> int:
        """Threads per folder, from either name of the key."""
        return self.intra_op_parallelism if self.thread_count is None else self.thread_count

    @field_validator("block_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        return aligned(value, "bytes")

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Aio:
        both_set = self.model_fields_set >= {"thread_count", "intra_op_parallelism"} and self.thread_count is not None
        if both_set and self.thread_count != self.intra_op_parallelism:
            raise ValueError(
                f"thread_count ({self.thread_count}) is an alias of intra_op_parallelism "
                f"({self.intra_op_parallelism}), and they differ: set only one of them"
            )
        return self

"""The section on file I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from infinity.config.fields import Count, Section, Size, Switch, Threads, aligned


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

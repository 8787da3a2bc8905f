"""Section `infinity.activations`: the tier of saved tensors."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from infinity.config.fields import Folders, Section, Size, positive_size_or_auto


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

    memory_bytes: Literal["auto"] | Size = "auto"
    """Limit on the bytes of saved tensors on the device that computes: those saved last, those in transfer, and those
    that backward needs next. `auto`: eight times the largest one, at least 64MiB."""

    @field_validator("memory_bytes", mode="before")
    @classmethod
    def _size_or_auto(cls, value: object) -> object:
        return positive_size_or_auto(value)

"""Section `zero_optimization`: sharding and tiers of states."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from infinity.config.fields import Folders, Section, Switch


class Offload(Section):
    """Tier of one kind of state."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`none`: on the device that computes; `cpu`: in host memory; `nvme`: in files under `nvme_path`."""

    nvme_path: Folders | None = Field(default=None, validate_default=True)
    """Folder on a local disk for the files of device `nvme`, or a list of folders on several drives. States are striped
    over the folders, so that the drives' bandwidths add up. Unused for other devices."""

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
    parameters. Parameters may be offloaded in stage 3 only; below it, they stay on the device that computes."""

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

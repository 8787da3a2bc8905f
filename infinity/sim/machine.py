"""Machines that a plan is made for: nodes, their GPUs and bytes of each memory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from infinity.engine.budget import host_share, nvme_share
from infinity.errors import ConfigError
from infinity.inputs import number_of
from infinity.plan.budget import Budget
from infinity.plan.policy import DeviceInfo, RankInfo
from infinity.plan.stage import Sharding
from infinity.tiers.accelerator import default_device
from infinity.tiers.available import update_processors

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class Machine:
    """Equal nodes. Each GPU has a rank; without GPUs each node has one rank, which computes in host memory."""

    host_memory: int
    """Bytes of a node."""
    nvme: int = 0
    """Bytes of a node."""
    nodes: int = 1
    gpus: int = 0
    """GPUs of a node."""
    device_memory: int = 0
    """Bytes of a GPU."""
    processors: int = 0
    """Processors of a node for updates; 0: as many as here."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 0:
            raise ConfigError(f"a machine has 1 or more nodes and 0 or more GPUs, not {self.nodes} and {self.gpus}")
        if self.host_memory < 1:
            raise ConfigError(f"--host-memory must be more than 0, not {self.host_memory}")
        if self.gpus and not self.device_memory:
            raise ConfigError(f"give the memory of each of the {self.gpus} GPUs: --device-memory")
        if self.device_memory and not self.gpus:
            raise ConfigError("--device-memory is that of a GPU, and the machine has none: give --gpus")

    @classmethod
    def here(cls, folder: Path | None = None) -> Machine:
        """Return this machine. folder: a folder on its drive; None: without nvme."""
        info = default_device().info
        nvme = 0 if folder is None else shutil.disk_usage(_existing(folder)).free
        gpus = 0 if info.type == "cpu" else number_of("LOCAL_WORLD_SIZE", 1, least=1)
        return cls(int(psutil.virtual_memory().total), nvme, 1, gpus, info.nbytes if gpus else 0, info.processors)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def rank_info(self, config: Config) -> RankInfo:
        """Return the ranks as a plan needs them."""
        backend = "" if self.ranks == 1 else "nccl" if self.gpus else "gloo"
        return RankInfo(self.ranks, self.ranks if Sharding.of(config.zero_optimization.stage).optim else 1, backend)

    def device_info(self, config: Config) -> DeviceInfo:
        """Return the device of a rank as a plan needs it."""
        processors = self.processors or update_processors(feeding=bool(self.gpus))
        each = max(1, processors // self.ranks_per_node)
        limit = config.infinity.memory.device or 0
        if not self.gpus:
            return DeviceInfo(processors=each, limit=limit)
        return DeviceInfo("cuda", host_addressable=False, nbytes=self.device_memory, processors=each, limit=limit)

    def resolved(self, config: Config) -> Config:
        """Return `config` with bytes in place of `"auto"` in `infinity.memory`: those of a node with nothing in use."""
        memory, given = config.infinity.memory, {}
        if memory.host == "auto":
            given["host"] = host_share(self.host_memory, computes_on_host=not self.gpus)
        if memory.nvme == "auto":
            given["nvme"] = nvme_share(self.nvme)
        section = config.infinity.model_copy(update={"memory": memory.model_copy(update=given)})
        return config.model_copy(update={"infinity": section})

    def budget(self, config: Config) -> Budget:
        """Return a rank's part of `infinity.memory` of a `resolved` config."""
        memory = config.infinity.memory
        share = [nbytes and int(nbytes) // self.ranks_per_node for nbytes in (memory.host, memory.nvme)]
        return Budget(share[0], memory.host_params, share[1], memory.device_optimizer)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())

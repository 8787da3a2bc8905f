"""Construction of models that are larger than memory: `with infinity.Init(config): model = Model(...)`."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.construction.spill import Spill, notice
from infinity.units.discover import UNIT_SIZE

if TYPE_CHECKING:
    from infinity.config import Config

_UNITS = 4
"""Number of units whose parameters may be in memory."""


class Init:
    """Build a model in the memory of a few units: `with infinity.Init(config): model = Model(...)`.

    config: the config that `infinity.initialize` gets: a dict, the path of a JSON file, or a Config.

    The model's own code builds the model on the CPU. The result is bit-identical to a model built without Init. Any
    code may read and edit its parameters, in the block and after it.

    Memory holds parameters of four times `infinity.unit_size` bytes (`auto`: 64 MiB). Each rank keeps the others in an
    anonymous file in `nvme_path`, in their own dtype. `infinity.initialize` moves rank 0's values to their tiers unit
    by unit, and frees the file's space meanwhile. Without `initialize`, the file is deleted with the model. Buffers
    stay in memory, and so do parameters that share memory with other tensors. If the config puts no states on nvme, all
    parameters stay in memory.

    Parameters built on the meta device are left to `infinity.initialize` and `infinity.load_pretrained`. Of nested
    blocks, the outermost with states on nvme counts.

    Raises StorageError on entry, if the folder accepts no file. In the block, raises OutOfSpaceError if the folder's
    file system is full, and ModelError for a parameter on another device than the CPU and meta.
    """

    def __init__(self, config: Config | dict[str, Any] | str | PathLike[str]) -> None:
        from infinity.config import Config  # here, since pydantic takes as long to import as the engine

        config = Config.load(config)
        self._folders = config.zero_optimization.nvme_paths
        unit_size = config.infinity.unit_size
        self._budget = _UNITS * (UNIT_SIZE if unit_size == "auto" else unit_size)
        self._hooks: list[Any] = []

    def __enter__(self) -> Init:
        if self._folders:
            hook = partial(notice, Spill(self._folders, self._budget))
            self._hooks.append(register_module_parameter_registration_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        if self._hooks:
            self._hooks.pop().remove()

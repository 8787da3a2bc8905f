"""Construction of models that are larger than memory: `with infinity.Init(config): model = Model(...)`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.construction.spill import Spill, notice

if TYPE_CHECKING:
    from infinity.config import Config

_UNITS = 4
"""Parameters of as many units may be in memory."""


class Init:
    """Build a model in the memory of a few units: `with infinity.Init(config): model = Model(...)`.

    config: what `infinity.initialize` will be given: a dict, a path of a JSON file, or a Config. The model is built on
    the cpu by its own code and has, bit for bit, the values that it has without Init; any code may look
    at them and change them, in the block and after it. What exceeds four times `infinity.unit_size` is kept in an
    anonymous file in `nvme_path` by every rank, 4 bytes for each fp32 parameter. `infinity.initialize` moves the values
    (those of rank 0) to their tiers unit by unit, and gives the file's space back as it goes; without it the file is
    gone with the model. Buffers stay in memory, as do parameters that share their memory with other tensors. Where the
    config puts nothing on nvme, everything stays in memory.

    Parameters built on the meta device are left to `infinity.initialize` and `infinity.load_pretrained`. Of nested
    ones, the outermost counts.

    Raises StorageError where the block is entered, for a folder that takes no file; in the block OutOfSpaceError, for
    one that is too small, and ModelError, for a parameter on another device than the cpu and meta.
    """

    def __init__(self, config: Config | dict[str, Any] | str | Path) -> None:
        from infinity.config import Config  # here, since pydantic takes as long to import as the engine

        config = Config.load(config)
        self._folders = config.zero_optimization.nvme_paths
        self._budget = _UNITS * config.infinity.unit_size
        self._hooks: list[Any] = []

    def __enter__(self) -> Init:
        if self._folders:
            hook = partial(notice, Spill(self._folders, self._budget))
            self._hooks.append(register_module_parameter_registration_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        if self._hooks:
            self._hooks.pop().remove()

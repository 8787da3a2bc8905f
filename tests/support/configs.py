"""Engine configs for tests: everything on nvme, units and tiles small, buffers poisoned and reused oldest first."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.config import Config
from support import room

DEVICES = ("none", "cpu", "nvme")
PLACEMENTS = [(param, optim) for param in DEVICES for optim in DEVICES]
"""Where parameters and optimizer states live: all nine pairs."""


def engine_config(
    param: str = "nvme",
    optim: str = "nvme",
    *,
    folder: str | Path | Sequence[str | Path] | None = None,
    bf16: bool = False,
    accumulation: int = 1,
    clip: float = 0.0,
    micro: int = 4,
    stage: int = 3,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    optimizer: str = "AdamW",
    unit_size: int | str = 100_000,
    debug: bool = True,
    aio: Mapping[str, Any] | None = None,
    fp16: Mapping[str, Any] | None = None,
    communication: str | None = None,
    accumulated_in: str = "fp32",
    **infinity: Any,
) -> Config:
    """A config with `debug` on, whose units leave their buffers as those of a large model do (`cache_bytes` of 0).

    infinity: more keys of that section (update, prefetch_bytes, tile_size, master, ...).

    folder: where nvme files lie, or several; in memory by default, if `room` allows. aio, fp16: these sections.
    communication, accumulated_in: the dtypes of the sums of gradients.
    """
    path = folder or room.in_memory() or tempfile.gettempdir()
    params = {"lr": lr, "weight_decay": weight_decay, **({"eps": eps} if optimizer in ("Adam", "AdamW") else {})}
    section = {"unit_size": unit_size, "tile_size": 4096, "debug": debug, "adam_threads": 1, "cache_bytes": 0}
    section |= infinity
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "bf16": {"enabled": bf16},
            "fp16": {"enabled": fp16 is not None, **(fp16 or {})},
            "communication_data_type": communication,
            "data_types": {"grad_accum_dtype": accumulated_in},
            "optimizer": {"type": optimizer, "params": params},
            "zero_optimization": {
                "stage": stage,
                "offload_param": {"device": param, "nvme_path": path},
                "offload_optimizer": {"device": optim, "nvme_path": path},
            },
            "aio": dict(aio or {}),
            "infinity": section,
        }
    )


def raw(folder: Path | str | list[str] | None, param: str = "nvme", optim: str = "nvme", **top: Any) -> dict[str, Any]:
    """The keys as a user writes them, with the states in `folder` and without `debug`."""
    path = {} if folder is None else {"nvme_path": folder if isinstance(folder, list) else str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, **path},
            "offload_optimizer": {"device": optim, **path},
        },
        "infinity": {"unit_size": 100_000, "tile_size": 4096},
        **top,
    }

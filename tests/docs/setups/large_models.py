"""`Model` and `engine.json` of docs/large_models.md."""

import json
from pathlib import Path
from types import EllipsisType

from torch import nn

import infinity


class Model(nn.Sequential):
    def __init__(self, _: EllipsisType) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))


drive = {"device": "nvme", "nvme_path": "."}
config = {"train_batch_size": 4, "zero_optimization": {"offload_param": drive, "offload_optimizer": drive}}
Path("engine.json").write_text(json.dumps(config))
assert infinity.Init

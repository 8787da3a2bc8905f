"""`model`, `config` and `batches` of docs/durable.md."""

import torch

import infinity  # noqa: F401 - the page uses it

model = torch.nn.Linear(4, 4)
batches = list(torch.ones(3, 2, 4))
place = {"device": "nvme", "nvme_path": "."}
config = {
    "train_batch_size": 2,
    "zero_optimization": {"offload_param": place, "offload_optimizer": place},
    "infinity": {"durable": True},
}

"""`model`, `config` and `adamw.pt` of docs/optimizer.md."""

import torch
from torch import nn

import infinity

config = {"train_batch_size": 1}
model = nn.Linear(4, 4)


def before(block: int) -> None:
    """Bring a model without an engine, and the state dict of an AdamW that has trained it."""
    global model
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "adamw.pt")


assert infinity.initialize

"""Cases for the processes of a `support.ranks.Group`: streams of merged weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import infinity
from infinity.errors import RanksError
from integrations.test_stream import engine_of, linear, llama, peft, train


def merged(rank: int, *, folder: Any, stage: int, **options: Any) -> dict[str, Any]:
    """Train and stream the merged weights, of which rank 1 drops some first. Returns them, and peft's own merge."""
    warnings.filterwarnings("ignore", "something still refers to the parameters")  # peft's forward
    model: Any = peft.get_peft_model(llama(), linear(target_modules=["q_proj", "embed_tokens"]))
    engine = engine_of(model, folder, lr=0.01, stage=stage, **options)
    train(engine)
    raised = ""
    try:
        for number, _ in enumerate(infinity.stream_weights(engine)):
            if rank == 1 and number == 3:
                break
    except RanksError as error:
        raised = str(error)
    train(engine)
    values = {name: value.clone() for name, value in infinity.stream_weights(engine)}
    engine.close(restore=True)
    state = {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}
    return {"values": values, "state": state, "raised": raised}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())

"""A scaled-down Llama 7B trains in the default configuration; each block has more units than there are buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.units.discover import UNIT_SIZE, UnitParameters, discover
from support.hugging_face import loss_of, transformers
from support.lifetime import assert_nothing_leaked, pool_buffers
from support.loops import Result, assert_close, open_engine, parameters_of, plain, plain_bf16, train
from support.models import seeded

SCALE = 32
"""Divisor of every width; the sizes of weights and units are divided by its square."""
LAYERS, HIDDEN, FEED_FORWARD, HEADS, VOCABULARY = 32, 4096, 11008, 32, 32000


def shape(layers: int, scale: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY // scale, hidden_size=HIDDEN // scale, intermediate_size=FEED_FORWARD // scale,
        num_hidden_layers=layers, num_attention_heads=max(2, HEADS // scale), max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip


def llama() -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(shape(4, SCALE))
    return model.train()


def checkpointed(reentrant: bool) -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


def config(folder: Path, bf16: bool, **infinity: Any) -> Config:
    """Return a user's minimal config; everything else has its default."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "infinity": infinity,
        }
    )


def scaled(folder: Path, bf16: bool) -> Config:
    return config(folder, bf16, unit_size=UNIT_SIZE // SCALE**2, cache_bytes=0)  # blocks of 7 B would not fit


def block(units: list[UnitParameters], number: int) -> list[list[str]]:
    """Return the parameters of each unit of one block, by their names in the block."""
    prefix = f"model.layers.{number}."
    return [[name.removeprefix(prefix) for name in unit.names] for unit in units if unit.names[0].startswith(prefix)]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_structure_is_that_of_7_b(bf16: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(shape(LAYERS, 1))
    width = 2 if bf16 else 4
    expected = discover(whole, UNIT_SIZE, width)
    units = discover(seeded(llama), UNIT_SIZE // SCALE**2, width)
    assert sum(p.numel() for p in whole.parameters()) > 6.7e9
    assert len(block(expected, 17)) == 8
    for number in range(4):
        assert block(units, number) == block(expected, number)
    assert len(units) == len(expected) - 8 * (LAYERS - 4)


BATCHES = [
    (torch.randint(VOCABULARY // SCALE, (2, 16), generator=torch.Generator().manual_seed(seed)),) for seed in range(4)
]


@pytest.mark.filterwarnings(
    "error",
    "ignore:.*gradient_checkpointing_enable:FutureWarning",
    "ignore:None of the inputs have requires_grad",
)
@pytest.mark.parametrize(
    ("bf16", "reentrant"),
    [
        pytest.param(False, None, id="fp32-plain"),
        pytest.param(False, True, id="fp32-reentrant"),
        pytest.param(False, False, id="fp32-non-reentrant"),
        pytest.param(True, None, id="bf16-plain"),
        pytest.param(True, True, id="bf16-reentrant"),
        pytest.param(True, False, id="bf16-non-reentrant"),
    ],
)
def test_trains_without_a_warning(bf16: bool, reentrant: bool | None, tmp_path: Path) -> None:
    """Training warns of nothing, quarantines no buffer and needs no more buffers than the pool has."""

    def make() -> nn.Module:
        return llama() if reentrant is None else checkpointed(reentrant)

    settings = scaled(tmp_path, bf16)
    expected = (plain_bf16 if bf16 else plain)(seeded(make), BATCHES, settings, loss_of)
    with open_engine(seeded(make), settings) as engine:
        assert len(engine.units) > pool_buffers(engine)
        losses = train(engine, BATCHES, loss_of)
        assert not engine.parts.store.kept.warned
        result = Result(losses, parameters_of(engine))
        assert_nothing_leaked(engine)
    assert_close(result, expected, loss=1e-3 if bf16 else 1e-6, parameters=1e-2 if bf16 else 1e-5)

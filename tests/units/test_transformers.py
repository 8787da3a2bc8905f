"""Unmodified models of `transformers` train with everything on nvme: tied, rotary, relative and shared layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.configs import engine_config
from support.hugging_face import BATCHES, LENGTH, VOCABULARY, gpt2, llama, loss_of, transformers
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers
from support.loops import Result, assert_close, open_engine, parameters_of, plain, plain_bf16, train
from support.models import seeded

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def deberta_v2() -> nn.Module:
    """Return a model whose layers all get the position embeddings that a layer norm computes from one weight."""
    config = transformers.DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=LENGTH, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        norm_rel_ebd="layer_norm", type_vocab_size=0, share_att_key=False, **NO_DROPOUT,
    )  # fmt: skip
    return transformers.DebertaV2ForMaskedLM(config)


def deberta() -> nn.Module:
    """Return a model whose layers all get the weight of the encoder's position embedding."""
    config = transformers.DebertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=LENGTH, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0,
        **NO_DROPOUT,
    )  # fmt: skip
    return transformers.DebertaForMaskedLM(config)


def albert() -> nn.Module:
    """Return a model of six shared layers, with an embedding narrower than the model."""
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_hidden_groups=2, num_attention_heads=2, max_position_embeddings=LENGTH, classifier_dropout_prob=0.0,
        **NO_DROPOUT,
    )  # fmt: skip
    return transformers.AlbertForMaskedLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (gpt2, 6),
    "llama": (llama, 6),
    "deberta": (deberta, 6),
    "deberta-v2": (deberta_v2, 6),
    "albert": (albert, 4),
}
"""name → constructor and the least number of units (ALBERT has two layers that are shared by all)."""


def checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

    return run


def made(name: str, reentrant: bool | None) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = MODELS[name][0]().train()
        if reentrant is not None and name == "albert":  # has no checkpointing of its own: wrap what its layers do
            for group in model.albert.encoder.albert_layer_groups:
                for layer in group.albert_layers:
                    layer.forward = checkpointed(layer.forward, reentrant)
        elif reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model  # type: ignore[no-any-return]

    return make


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_trains(name: str, reentrant: bool | None, bf16: bool, tmp_path: Path) -> None:
    """fp32: losses within 1e-6 relative. bf16: within 1e-3, a fifth of what one rounding to bf16 may change."""
    make = made(name, reentrant)
    if name == "deberta-v2" and reentrant:
        pytest.skip("plain PyTorch refuses it too: all layers share one graph of the position embeddings")
    config = engine_config(folder=tmp_path, bf16=bf16, unit_size=60_000, prefetch_bytes=40_000, weight_decay=0.1)
    expected = (plain_bf16 if bf16 else plain)(seeded(make), BATCHES, config, loss_of)
    with open_engine(seeded(make), config) as engine:
        assert len(engine.units) >= MODELS[name][1]
        residents = Residents(engine)
        losses = train(engine, BATCHES, loss_of)
        assert residents.most <= pool_buffers(engine)
        result = Result(losses, parameters_of(engine))
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)
    assert_close(result, expected, loss=1e-3 if bf16 else 1e-6, parameters=1e-2 if bf16 else 1e-5)


def test_generates(tmp_path: Path) -> None:
    """`generate` with its cache, before and after a step, gives the plain model's tokens."""
    reference, model = seeded(gpt2), seeded(gpt2)
    config = engine_config(folder=tmp_path, unit_size=60_000)
    prompt = BATCHES[0][0][:1, :4]

    def say(it: Any) -> list[int]:
        said = it.eval().generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        it.train()
        out: list[int] = said[0].tolist()
        return out

    with open_engine(model, config) as engine:
        assert say(model) == say(reference)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
        for batch in BATCHES[:2]:
            engine.backward(loss_of(engine, batch))
            engine.step()
            loss_of(reference, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert say(model) == say(reference)
        assert_nothing_leaked(engine)

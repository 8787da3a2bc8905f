"""The engine against a plain PyTorch loop: the same losses and the same parameters after 20 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.sim.gpt2 import GPT2, GPT2Config
from support.configs import engine_config
from support.loops import Batches, Result, assert_close, distance, plain, plain_bf16, trained
from support.models import VOCABULARY, Linears, Stack, seeded, token_batches, vector_batches

STEPS = 10
DIFFERENT = 4
"""Batches that are seen again and again, so that the losses fall."""


def gpt2() -> nn.Module:
    return GPT2(GPT2Config(VOCABULARY, seq_length=8, num_layers=3, hidden_size=32, num_attention_heads=2))


def checkpointed_gpt2() -> nn.Module:
    return GPT2(
        GPT2Config(VOCABULARY, 8, 3, 32, 2, tie_word_embeddings=False, checkpoint_activations=True, init_std=0.1)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "gpt2": (gpt2, 2048, 20),
    "gpt2 untied, checkpointed": (checkpointed_gpt2, 100_000, 6),
    "stack": (lambda: Stack(depth=4), 2048, 14),
    "linears": (lambda: Linears(depth=6), 2048, 6),
}
"""name → constructor, unit_size, and the least number of units that makes."""


def batches_of(name: str, accumulation: int, dtype: torch.dtype = torch.float32) -> Batches:
    if name == "linears":
        different = [(x.to(dtype), y) for x, y in vector_batches(DIFFERENT * accumulation)]
    else:
        different = token_batches(DIFFERENT * accumulation)
    return [different[i % len(different)] for i in range(STEPS * accumulation)]


def settled(result: Result) -> Result:
    """Without the biases of attention keys.

    They shift all scores of a row alike, so their gradient is 0 but for rounding errors, and Adam divides those by
    their own size: they walk at random, and torch's own implementations differ in them by as much as they move.
    """
    parameters = dict(result.parameters)
    for name, value in result.parameters.items():
        if name.endswith("attn.c_attn.bias"):
            query, _, output = value.chunk(3)
            parameters[name] = torch.cat([query, output])
    return Result(result.losses, parameters)


def per_tensor(one: Result, other: Result) -> float:
    """Return the largest ‖Δp‖ / ‖p‖ of any parameter."""
    return max(
        float((one.parameters[name].double() - p.double()).norm() / p.double().norm())
        for name, p in other.parameters.items()
    )


def learns(result: Result, accumulation: int) -> bool:
    cycle = DIFFERENT * accumulation
    return sum(result.losses[-cycle:]) < sum(result.losses[:cycle])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("optimizer", "accumulation", "clip"),
    [("AdamW", 1, 0.0), ("AdamW", 1, 0.5), ("AdamW", 3, 0.0), ("Adam", 1, 0.0), ("Adam", 3, 0.5)],
)
def test_fp32(name: str, optimizer: str, accumulation: int, clip: float, tmp_path: Path) -> None:
    """Losses within 1e-6 relative; parameters within 1e-6 where the promise is 1e-5."""
    make, unit_size, units = MODELS[name]
    config = engine_config(
        folder=tmp_path,
        optimizer=optimizer,
        weight_decay=0.1,
        accumulation=accumulation,
        clip=clip,
        unit_size=unit_size,
    )
    batches = batches_of(name, accumulation)
    ours, expected = trained(seeded(make), batches, config), plain(seeded(make), batches, config)
    assert ours.units >= units
    assert_close(settled(ours), settled(expected), loss=1e-6, parameters=1e-6)
    assert distance(ours, expected) < 1e-3
    assert learns(ours, accumulation)


@pytest.mark.parametrize("name", MODELS)
def test_fp32_per_tensor(name: str, tmp_path: Path) -> None:
    """With eps 1e-4, which keeps Adam from blowing up rounding errors of small gradients: every tensor within 2e-6."""
    make, unit_size, _ = MODELS[name]
    config = engine_config(folder=tmp_path, eps=1e-4, unit_size=unit_size)
    batches = batches_of(name, 1)
    ours, expected = trained(seeded(make), batches, config), plain(seeded(make), batches, config)
    assert per_tensor(settled(ours), settled(expected)) <= 2e-6
    assert distance(ours, expected) <= 2e-6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.5)])
def test_bf16(name: str, accumulation: int, clip: float, tmp_path: Path) -> None:
    """Losses within 1 % of a mixed-precision loop with an fp32 master; both ways to keep it give the same bits."""
    make, unit_size, _ = MODELS[name]
    batches = batches_of(name, accumulation, torch.bfloat16)
    runs = []
    for master in ("remainder", "fp32"):
        config = engine_config(
            folder=tmp_path,
            bf16=True,
            lr=3e-3,
            accumulation=accumulation,
            clip=clip,
            unit_size=unit_size,
            master=master,
        )
        runs.append(trained(seeded(make), batches, config))
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(p, runs[1].parameters[n]) for n, p in runs[0].parameters.items())
    assert_close(runs[0], plain_bf16(seeded(make), batches, config), loss=0.01, parameters=0.02)
    assert learns(runs[0], accumulation)

"""Fused experts of every family of transformers in tiles: losses and gradients of the untiled model, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from infinity.nn import experts, replace
from infinity.nn.pieces import Assembly, Pieces
from zoo.kinds import Architecture, architectures
from zoo.models import loss_of, made, micro_batches, seed_all, seed_from_generators

FAMILIES = (
    *("Mixtral", "Qwen3Moe", "Qwen3Next", "DeepseekV2", "DeepseekV3", "DeepseekV4", "GptOss", "Olmoe", "Phimoe"),
    *("Glm4Moe", "Llama4", "Jamba", "Qwen2Moe", "GraniteMoe", "NemotronH", "Ernie4_5_Moe", "MiniMaxM2", "Dots1"),
    *("Lfm2Moe", "FlexOlmo", "Beam", "HYV4", "Inkling2", "AriaText", "Zaya"),
)


def named(name: str) -> Architecture:
    return next(each for each in architectures() if each.name == name)


def gradients(model: nn.Module, batches: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    seed_all(3)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    found: dict[str, torch.Tensor] = {}
    pieces, whole = Pieces(model), Assembly()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found |= dict(whole.add([pieces.of(name, parameter)], parameter.grad))
    return losses, found


@pytest.mark.campaign(few=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_train_as_the_untiled_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_from_generators()
    architecture = named(f"{family}ForCausalLM")
    whole = made(architecture)
    _, batches = micro_batches(whole, architecture, 2)
    fused = [module for module in whole.modules() if experts.is_fused(module)]
    assert fused
    limit = max(2 * experts.nbytes(module) // module.num_experts for module in fused)  # type: ignore[operator]
    tiled = copy.deepcopy(whole)
    # Tiles of linear layers sum the gradient of their input.
    monkeypatch.setattr(
        replace, "_is_large", lambda module, size: experts.is_fused(module) and experts.nbytes(module) > size
    )
    assert replace.tile(tiled, limit)
    (losses, found), (expected, others) = gradients(tiled, batches), gradients(whole, batches)
    assert losses == expected and found.keys() == others.keys()
    assert all(torch.equal(found[name], value) for name, value in others.items())

"""Families of experts in transformers, as small models, with experts whole and in tiles."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from infinity.nn import experts, replace
from zoo.inputs import Batch
from zoo.kinds import Architecture, architectures
from zoo.models import made, micro_batches

FAMILIES = (
    *("Mixtral", "Qwen3Moe", "Qwen3Next", "DeepseekV2", "DeepseekV3", "DeepseekV4", "GptOss", "Olmoe", "Phimoe"),
    *("Glm4Moe", "Llama4", "Jamba", "Qwen2Moe", "GraniteMoe", "NemotronH", "Ernie4_5_Moe", "MiniMaxM2", "Dots1"),
    *("Lfm2Moe", "FlexOlmo", "Beam", "HYV4", "Inkling2", "AriaText", "Zaya", "JetMoe"),
)
"""Families that differ in their experts, router or other layers. A name without task is that of a causal model."""

OTHERS = (
    *("AXK1", "AXK2", "Afmoe", "BailingHybrid", "Cohere2Moe", "DeepseekV32", "ExaoneMoe", "Flint", "Gemma4"),
    *("Glm4MoeLite", "GlmMoeDsa", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared", "HYV3", "HunYuanMoEV1"),
    *("Inkling", "KimiLinear", "Kolibri1", "Laguna", "Mellum", "MiMoV2Flash", "MiniMax", "MiniMaxM3VL", "Mistral4"),
    *("Qwen3_5Moe", "SolarOpen", "AriaForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration"),
    *("Glm4vMoeForConditionalGeneration", "Glm5NextForConditionalGeneration"),
    *("Inkling2ForConditionalGeneration", "Llama4ForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration"),
    *("MistralLarge4ForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    *("Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Step3p7ForConditionalGeneration"),
    "UnlimitedOcrForConditionalGeneration",
)
"""All others that the zoo can train, with images in text or alone."""

WHOLE = {
    "Dbrx": "its experts are rows of two-dimensional tensors in a child module",
    "LongcatFlash": "one of its two tensors has rows for experts without weights",
    "MuseSparkForConditionalGeneration": "its experts share a norm",
}
"""Families that `infinity.nn.tile` leaves whole or refuses, and why."""

ONLY_FP32 = {
    "Inkling2": "plain PyTorch fails in bf16",
    "Inkling2ForConditionalGeneration": "plain PyTorch fails in bf16",
    "MiniMax": "its buffers are fp32; data_types.buffer_dtype casts them",
}
"""Families that do not train in bf16 as they are, and why."""

UNMADE = (
    *("DeepseekOcr2ForConditionalGeneration", "DiffusionGemmaForBlockDiffusion", "Dots3NoteForCausalLM"),
    *("Dots3NoteForConditionalGeneration", "InklingForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
    *("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
)
"""Classes whose configuration the zoo cannot make small; `bench/results/zoo.md` has the reasons."""

DENSE = ("Gemma4ForConditionalGeneration",)
"""Classes that have experts only if their configuration turns them on."""


def with_experts() -> set[str]:
    """Return the classes whose module has fused experts, by its source. Classifiers of sequences are left out."""
    root = Path(transformers.__file__).parent / "models"
    found = set()
    for each in architectures():
        files = (root / model_type_to_module_name(each.model_type)).glob("modeling_*.py")
        if each.kind != "sequence" and any(map(_SIGNS.search, (file.read_text() for file in files))):
            found.add(each.name)
    return found


_OWN = *experts.UNDECORATED, *experts.SORTED, "DbrxExperts", "LongcatFlashExperts"
_SIGNS = re.compile("|".join(("@use_experts_implementation", *_OWN)))


def named(family: str) -> Architecture:
    name = family if family.endswith("ForConditionalGeneration") else f"{family}ForCausalLM"
    return next(each for each in architectures() if each.name == name)


def with_batches(family: str, steps: int) -> tuple[nn.Module, list[tuple[Batch]]]:
    """Return a small model of the family, and a batch for each step."""
    model = made(named(family))
    return model, micro_batches(model, named(family), steps)[1]


def nbytes_of(model: nn.Module, share: float) -> int:
    """Return the size of a tile that has this share of a layer's experts, at least one; 0 without fused experts."""
    sizes = [0]
    for module in model.modules():
        if experts.is_fused(module):
            number = len(next(module.parameters(recurse=False)))
            sizes.append(experts.nbytes(module) // number * math.ceil(number * share))
    return max(sizes)


def tiled(model: nn.Module, max_bytes: int) -> Any:
    """Return a copy whose experts are tiles. Linear layers stay whole: their tiles sum the gradient of their input."""
    model = copy.deepcopy(model)

    def is_large(module: nn.Module, size: int) -> bool:
        return experts.is_fused(module) and experts.nbytes(module) > size

    with mock.patch.object(replace, "_is_large", is_large):
        assert replace.tile(model, max_bytes)
    return model

"""A few architectures of `make zoo`: each kind of input, random routers, reversible layers.

The others are the evidence for the verdicts on models that draw random numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from zoo import judge
from zoo.judge import Verdict
from zoo.kinds import Architecture, architectures
from zoo.workers import judge_all

CHOSEN = (
    *("ReformerModelWithLMHead", "PhimoeForCausalLM", "MambaForCausalLM", "FalconForCausalLM", "Qwen3MoeForCausalLM"),
    *(
        "Qwen2_5_VLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "CLIPModel",
        "ConvNextForImageClassification",
    ),
    *("Wav2Vec2ForCTC", "MarianMTModel"),
)


def named(name: str) -> Architecture:
    return next(each for each in architectures() if each.name == name)


def verdict_of(architecture: Architecture) -> Verdict:
    return next(verdict for _, verdict in judge_all([architecture], jobs=1))


@pytest.mark.campaign(few=3)
@pytest.mark.parametrize("name", CHOSEN)
def test_trains_as_plain_pytorch(name: str) -> None:
    verdict = verdict_of(named(name))
    assert verdict.kind == "equal", verdict


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the loop with tiny units."""
    monkeypatch.setattr(judge, "UNITS", {"tiny": judge.UNITS["tiny"]})
    monkeypatch.setattr(judge, "WAYS", ("loop",))


@pytest.mark.campaign
@pytest.mark.usefixtures("few_runs")
def test_reformer_from_seeded_numbers_and_from_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reformer calls `torch.seed` in each layer, so plain PyTorch differs from itself."""
    reformer = named("ReformerModelWithLMHead")
    assert verdict_of(reformer).kind == "equal"
    monkeypatch.setattr(judge, "seed_from_generators", lambda: None)
    verdict = verdict_of(reformer)
    assert verdict.kind == "cannot" and "differs from itself" in verdict.reason


@pytest.mark.campaign
@pytest.mark.usefixtures("few_runs")
def test_phimoe_from_the_same_and_from_other_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-MoE's router samples its experts. Numbers in another order are a difference, which is found."""
    phimoe = named("PhimoeForCausalLM")
    assert verdict_of(phimoe).kind == "equal"
    train = judge.train

    def drawing(*args: Any) -> list[float]:
        torch.rand(1)
        return train(*args)

    monkeypatch.setattr(judge, "train", drawing)
    verdict = verdict_of(phimoe)
    assert verdict.kind == "differs" and verdict.runs[0].loss > judge.LOSS


def test_every_class_is_named_once() -> None:
    names = [each.name for each in architectures()]
    assert len(names) == len(set(names)) > 500

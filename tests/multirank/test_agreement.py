"""Ranks with different models or configs, and a rank that fails to construct its engine: all ranks raise at start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.comm.agreement.comparison import MAY_DIFFER, groups_in_common, in_common
from infinity.config import Config
from infinity.engine.optimizer.unit_optimizer import param_groups
from infinity.plan.plan import lay_out
from infinity.plan.policy import compute_dtype
from infinity.units.discover import discover_model
from multirank import odd_cases
from support.configs import engine_config
from support.models import Stack, seeded
from support.ranks import Group


@pytest.mark.parametrize(
    ("options", "theirs", "mine"),
    [
        ({"clip": 0.5}, "gradient_clipping = 0.0", "gradient_clipping = 0.5"),
        ({"optimizer": "Adam"}, "optimizer.type = AdamW", "optimizer.type = Adam"),
        ({"fp16": {"loss_scale": 8}}, "fp16.enabled = False", "fp16.enabled = True"),
        ({"stage": 2, "param": "none"}, "zero_optimization.stage = 3", "zero_optimization.stage = 2"),
        ({"prefetch_bytes": 0}, "infinity.prefetch_bytes = auto", "infinity.prefetch_bytes = 0"),
        ({"memory": {"device": "1GiB"}}, "infinity.memory.device = None", "infinity.memory.device = 1073741824"),
        # It decides how many gradients a rank collects at once, and so when it reduces one.
        ({"debug": False}, "infinity.debug = True", "infinity.debug = False"),
    ],
    ids=str,
)
def test_different_configs(pair: Group, options: dict[str, Any], theirs: str, mine: str, tmp_path: Path) -> None:
    """All ranks raise the same text, with the first key that differs; a later engine works, and no file is left."""
    one, other = pair.run(odd_cases.odd, folder=str(tmp_path), which=1, options=options)
    assert one == other
    assert one["type"] == "RanksError"
    assert one["text"].startswith(f"the ranks have different configs. rank 0: {theirs}; rank 1: {mine}. Start all ")
    assert os.listdir(tmp_path) == []


def test_a_scheduler_that_others_lack(pair: Group, tmp_path: Path) -> None:
    top = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    one, other = pair.run(odd_cases.odd, folder=str(tmp_path), which=0, top=top)
    assert one == other
    assert "rank 0: scheduler.type = WarmupLR; rank 1: scheduler = None. Start" in one["text"]


def test_keys_that_may_differ(pair: Group, tmp_path: Path) -> None:
    """Keys about a rank's machine may differ; the ranks train."""
    other = tmp_path / "other"
    other.mkdir()
    options = {"folder": str(other), "adam_threads": 2, "aio": {"queue_depth": 4, "block_size": 65536}}
    raised = pair.run(odd_cases.odd, folder=str(tmp_path), which=1, options=options, top={"steps_per_print": 3})
    assert raised == [{}, {}]


@pytest.mark.parametrize(
    ("change", "theirs", "mine"),
    [
        ("another_shape", "parameter head.weight [61, 32] float32", "parameter head.weight [64, 32] float32"),
        ("one_block_less", "parameter blocks.5.norm.weight [32] float32", "parameter head.weight [61, 32] float32"),
        ("another_dtype", "parameter embedding.weight [61, 32] float32", "parameter embedding.weight [61, 32] float64"),
        ("a_frozen_head", "trained in param_group 0, in unit head", "not trained, in unit head"),
        ("another_name", "parameter blocks.2.up.weight", "parameter blocks.2.down.weight"),
        ("another_buffer", "param_group 0 has lr = 0.001", "buffer head.scale [2] float32"),
        ("blocks_in_another_order", "parameter blocks.0.norm.weight", "parameter head.weight"),
        ("two_groups", "trained in param_group 0, in unit embedding", "trained in param_group 1, in unit embedding"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_different_models(pair: Group, which: int, change: str, theirs: str, mine: str, tmp_path: Path) -> None:
    one, other = pair.run(odd_cases.odd, folder=str(tmp_path), which=which, change=change)
    assert one == other
    assert one["type"] == "RanksError"
    said = one["text"].removeprefix("the ranks have different models. rank 0: ")
    said, hint = said.split(". Build the same model on every rank")
    assert hint == ("" if change == "another_buffer" else ", with the same parameters trained")
    first, second = said.split("; rank 1: ")
    assert theirs in (second if which == 0 else first)
    assert mine in (first if which == 0 else second)


def test_different_hyper_parameters_of_a_group(pair: Group, tmp_path: Path) -> None:
    one, other = pair.run(odd_cases.odd, folder=str(tmp_path), which=1, change="another_rate")
    assert one == other
    said = "rank 0: param_group 0 has lr = 0.001; rank 1: param_group 0 has lr = 0.01. Give"
    assert one["text"].startswith(f"the ranks have different param_groups. {said}")


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        ({"options": {"folder": "/nowhere"}}, "StorageError", "/nowhere does not exist; create it"),
        ({"change": "all_frozen"}, "ModelError", "the model has no trainable parameters"),
        ({"change": "of_another_model"}, "ConfigError", "that is not the model's"),
        ({"top": {"train_batch_size": 9}}, "ConfigError", "do not multiply"),
        ({"top": {"gradient_cliping": 1.0}}, "ConfigError", "gradient_clipping"),
        ({"faults": True}, "OSError", "[Errno 5]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [0, 1])
def test_one_rank_cannot_make_its_engine(
    pair: Group, trouble: dict[str, Any], kind: str, text: str, which: int, tmp_path: Path
) -> None:
    """The rank raises its own error, and the other raises one that names it, before the process group's time-out of 60
    s.
    """
    outcomes = pair.run(odd_cases.odd, folder=str(tmp_path), which=which, **trouble)
    mine, theirs = outcomes[which], outcomes[1 - which]
    assert mine["type"] == kind and text in mine["text"]
    assert theirs["type"] == "RanksError"
    assert theirs["text"].startswith(f"rank {which} failed: {kind}: ") and text in theirs["text"]
    assert os.listdir(tmp_path) == []


def test_who_has_what_among_four(four: Group, tmp_path: Path) -> None:
    texts = {raised["text"] for raised in four.run(odd_cases.odd, folder=str(tmp_path), which=2, options={"clip": 1.0})}
    assert len(texts) == 1
    assert "ranks 0, 1, 3: gradient_clipping = 0.0; rank 2: gradient_clipping = 1.0. Start" in texts.pop()


def lines_of(config: Config, model: Stack) -> list[str]:
    found = discover_model(
        model, config.infinity.unit_size, param_groups(model, None), dtype=compute_dtype(config), copies=lambda _: 1
    )
    layouts = lay_out(found.discovered, compute_dtype(config), 2)
    return in_common(config, layouts, model)


def test_every_key_is_compared_but_those_that_may_differ(tmp_path: Path) -> None:
    """The test lists the config's keys, so that new keys are compared, too."""
    keys: list[str] = []

    def walk(section: dict[str, Any], prefix: str) -> None:
        for name, value in section.items():
            keys.append(prefix + name)
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    config = engine_config(folder=tmp_path)
    walk(config.model_dump(), "")
    assert set(MAY_DIFFER) <= set(keys)
    said = {line.split(" = ")[0] for line in lines_of(config, seeded(Stack)) if not line.startswith("param")}
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    assert said == {key for key in keys if key not in sections and not key.startswith(MAY_DIFFER)}


def test_lines_are_of_values_and_not_of_objects(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path)
    assert lines_of(config, seeded(Stack)) == lines_of(config, seeded(Stack, 1))
    groups: list[dict[str, Any]] = [{"params": Stack().parameters(), "lr": torch.tensor(0.5), "name": object()}]
    found = groups_in_common(config, groups, {})
    assert found == groups_in_common(config, [{"lr": 0.5}], {})
    assert found[0] == "param_group 0 has lr = 0.5" and len(found) == 4

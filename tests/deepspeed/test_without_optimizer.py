"""An engine without an optimizer, such as that of a reference model: DeepSpeed's names work that need none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.deepspeed.engine_names import REFUSED
from infinity.errors import ConfigError, UsageError
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]
NAMES = json.loads((Path(__file__).parent / "engine_names.json").read_text())["methods"]
NEEDS_AN_OPTIMIZER = {"backward", "scale", "step", "offload_states", "reload_states"}
"""Names that DeepSpeed refuses, too."""


def reference(opens: Opens, stage: int, **config: Any) -> Any:
    config.setdefault("train_micro_batch_size_per_gpu", 2)
    return opens(stage, optimizer=None, **config)


def arguments(engine: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return name → arguments of the methods that need some, in an order in which they can be called."""
    batch, values = token_batches(1)[0], {name: value.clone() for name, value in engine.module.state_dict().items()}
    return {
        "destroy": (),
        "deepspeed_io": ([1, 2, 3],),
        "forward": batch,
        "is_iterable_style_dataset": ([],),
        "is_map_style_dataset": ([],),
        "load_checkpoint": (folder,),
        "load_module_state_dict": ({"module": values},),
        "save_16bit_model": (folder,),
        "save_checkpoint": (folder,),
        "save_fp16_model": (folder,),
        "set_gradient_accumulation_boundary": (True,),
        "set_train_batch_size": (engine.train_batch_size(),),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_every_name_works_or_is_refused_for_its_reason(opens: Opens, stage: int, tmp_path: Path) -> None:
    """Five of the 180 names of DeepSpeed's engine need an optimizer."""
    engine = reference(opens, stage)
    given = arguments(engine, tmp_path)
    last = ["save_checkpoint", "load_checkpoint", "destroy"]
    refused = set()
    for name in [*(name for name in NAMES if name not in last), *last]:
        value = getattr(engine, name)
        if name in REFUSED or not callable(value):
            continue
        loss = (torch.ones(()),) if name in ("backward", "scale") else ()
        try:
            value(*given.get(name, loss))
        except UsageError as error:
            assert "the engine has no optimizer" in str(error), name
            refused.add(name)
    assert refused == NEEDS_AN_OPTIMIZER


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_those_of_deepspeed(opens: Opens, stage: int) -> None:
    engine = reference(opens, stage, gradient_accumulation_steps=4)
    assert engine.get_batch_info() == (8, 2, 4)
    assert engine.get_global_grad_norm() is None and engine.was_step_applied() is False
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps) == (0, 0, 0, 0)
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    assert engine.is_gradient_accumulation_boundary()
    assert [len(batch) for batch in engine.deepspeed_io(list(range(5)))] == [2, 2, 1]
    with engine.no_sync():
        engine(*token_batches(1)[0])
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.lr_scheduler = "a scheduler"
    assert engine.lr_scheduler == "a scheduler"


def test_a_model_runs_without_a_batch_size(opens: Opens) -> None:
    """The config of a reference model may lack it; the names that return it raise."""
    engine = reference(opens, 3, train_micro_batch_size_per_gpu=None)
    engine(*token_batches(1)[0])
    with pytest.raises(ConfigError, match="no batch size"):
        engine.train_batch_size()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_holds_the_model(opens: Opens, stage: int, tmp_path: Path) -> None:
    """It is loaded without and with an optimizer, and a trained one without an optimizer."""
    expected = seeded(Stack, seed=1)
    engine = reference(opens, stage, model=seeded(Stack, seed=1))
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3}) is True
    other = reference(opens, stage, model=seeded(Stack))
    path, client_state = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step0") and client_state == {"epoch": 3}
    trained = opens(stage, model=seeded(Stack))
    trained.load_checkpoint(tmp_path, load_module_only=True)
    for each in (other, trained):
        for name, value in expected.state_dict().items():
            assert torch.equal(each.module_state_dict()[name], value)
    loss = trained(*token_batches(1)[0])
    trained.backward(loss)
    trained.step()
    trained.save_checkpoint(tmp_path / "trained")
    other.load_checkpoint(tmp_path / "trained", load_optimizer_states=False)
    assert other.global_steps == 1
    for name, value in trained.module_state_dict().items():
        assert torch.equal(other.module_state_dict()[name], value)


def test_frozen_parameters_are_those_of_the_script(opens: Opens, tmp_path: Path) -> None:
    """The engine needs no gradients; files with exclude_frozen_parameters leave out what the script had frozen."""
    model = seeded(Stack)
    model.head.requires_grad_(False)
    rest = {name for name in model.state_dict() if not name.startswith("head")}
    engine = reference(opens, 2, model=model)
    assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == rest
    engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    assert set(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == rest
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = reference(opens, 2)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    engine.destroy()
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["head.weight"]


def test_monitors_are_the_configs(opens: Opens, tmp_path: Path) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "reference"}
    engine = reference(opens, 3, csv_monitor=csv)
    engine.monitor.write_events([("score", 0.5, 4)])
    engine.destroy()
    [written] = tmp_path.rglob("*.csv")
    assert "0.5" in written.read_text()


def test_a_state_dict_is_loaded(opens: Opens) -> None:
    engine = reference(opens, 3, model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine.load_module_state_dict({"module": other.state_dict()})
    for name, value in other.state_dict().items():
        assert torch.equal(engine.module_state_dict()[name], value)

"""Options of `save_checkpoint` and `load_checkpoint` with DeepSpeed's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import train
from support.models import Stack, seeded, token_batches
from support.states import states_of

BATCHES = token_batches(6)


def partly_frozen(seed: int = 0) -> nn.Module:
    """Return a model whose embedding and first block are frozen."""
    model: Any = seeded(Stack, seed)
    for module in (model.embedding, model.blocks[0]):
        module.requires_grad_(False)
    return model


def opened(model: nn.Module, folder: Path, **options: Any) -> TrainingEngine:
    config = engine_config(folder=folder, bf16=True, **options)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    whole = {**config.model_dump(mode="json", exclude_unset=True), "scheduler": scheduler}
    return infinity.initialize(model, whole, device=CpuDevice())[0]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint after 3 steps, all states in it, and the model's values."""
    with opened(partly_frozen(), tmp_path) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path / "saved")
        return tmp_path / "saved", states_of(engine), engine.state_dict()


def moments_and_steps(engine: TrainingEngine) -> Any:
    return engine.optimizer.state_dict()["state"]


@pytest.mark.parametrize("only", [True, False])
def test_without_the_optimizers_states(saved: Any, only: bool, tmp_path: Path) -> None:
    """Values are loaded, with their fp32 masters; moments, steps and rates stay. `load_module_only` keeps progress."""
    folder, states, values = saved
    with opened(partly_frozen(1), tmp_path) as engine:
        train(engine, BATCHES[:1])
        engine.optimizer.param_groups[0]["weight_decay"] = 0.5
        before = moments_and_steps(engine)
        option = {"load_module_only": True} if only else {"load_optimizer_states": False}
        engine.load_checkpoint(folder, **option)  # type: ignore[arg-type]
        assert all(torch.equal(value, values[name]) for name, value in engine.state_dict().items())
        for name, parameter in engine.module.named_parameters():
            kind = "master" if parameter.requires_grad else "param"
            assert torch.equal(infinity.get_full_fp32_param(parameter), states[f"{name}/{kind}"].float()), name
        after = moments_and_steps(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(state[k], after[n][k]) for n, state in before.items() for k in state)
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.5
        assert engine.global_steps == (1 if only else 3)
        assert engine.lr_scheduler is not None
        assert engine.lr_scheduler.state_dict()["last_epoch"] == (1 if only else 3)
        train(engine, BATCHES[1:])


def test_without_the_schedulers_state(saved: Any, tmp_path: Path) -> None:
    with opened(partly_frozen(1), tmp_path) as engine:
        engine.load_checkpoint(saved[0], load_lr_scheduler_states=False)
        assert engine.global_steps == 3
        assert engine.lr_scheduler is not None
        assert engine.lr_scheduler.state_dict()["last_epoch"] == 0


@pytest.mark.parametrize("unit_size", [100_000, "1GB"])
def test_without_frozen_parameters(unit_size: Any, tmp_path: Path) -> None:
    """A checkpoint without the frozen base is smaller, and loads over a base without `load_module_strict`."""
    base: Any = partly_frozen().state_dict()
    with opened(partly_frozen(), tmp_path, unit_size=unit_size) as engine:
        train(engine, BATCHES[:3])
        small = engine.save_checkpoint(tmp_path / "saved", "small", exclude_frozen_parameters=True)
        whole = engine.save_checkpoint(tmp_path / "saved", "whole", save_latest=False)
        expected = engine.state_dict()
        losses = train(engine, BATCHES[3:])
    assert (tmp_path / "saved" / "latest").read_text() == "small"
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (small, whole)]
    frozen = sum(2 * value.numel() for name, value in base.items() if name.startswith(("embedding", "blocks.0")))
    assert sizes[1] - sizes[0] == pytest.approx(frozen, abs=4096)
    with opened(partly_frozen(), tmp_path) as engine:
        with pytest.raises(CheckpointError, match="is in the model only"):
            engine.load_checkpoint(tmp_path / "saved")
        train(engine, BATCHES[:1])
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
        assert train(engine, BATCHES[3:]) == losses


def test_parameters_of_the_checkpoint_only(saved: Any, tmp_path: Path) -> None:
    """Without `load_module_strict`, blocks that the model lacks are ignored."""

    def shorter() -> nn.Module:
        model: Any = seeded(lambda: Stack(depth=4))
        for module in (model.embedding, model.blocks[0]):
            module.requires_grad_(False)
        return model

    folder, _, values = saved
    with opened(shorter(), tmp_path) as engine:
        engine.load_checkpoint(folder, load_module_strict=False)
        assert all(torch.equal(value, values[name]) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_one_file(name: str, tied: bool, tmp_path: Path) -> None:
    """The file loads into a plain model in the engine's dtype."""
    with opened(seeded(lambda: Stack(tied=tied)), tmp_path) as engine:
        train(engine, BATCHES[:2])
        assert engine.save_16bit_model(tmp_path / "weights", name)
        expected = engine.state_dict()
    path = tmp_path / "weights" / name
    assert [file.name for file in path.parent.iterdir()] == [name]
    loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    plain = Stack(tied=tied).bfloat16()
    plain.load_state_dict(loaded, strict=not (tied and path.suffix == ".safetensors"))
    assert all(torch.equal(value, expected[key]) for key, value in plain.state_dict().items())


def test_weights_without_the_frozen_ones(tmp_path: Path) -> None:
    with opened(partly_frozen(), tmp_path) as engine:
        engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True).keys() == trained


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with opened(partly_frozen(), tmp_path) as engine:
        with pytest.raises(CheckpointError, match="could not be written"):
            engine.save_16bit_model(tmp_path / "file")
        train(engine, BATCHES[:1])


def test_param_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """Groups are matched by position, and each would get the other's rate."""

    def engine(seed: int, *, turned: bool) -> TrainingEngine:
        model: Any = seeded(Stack, seed)
        head = {"params": list(model.head.parameters()), "lr": 0.1}
        others = {"params": [p for name, p in model.named_parameters() if not name.startswith("head")], "lr": 1e-3}
        groups = [others, head] if turned else [head, others]
        return infinity.initialize(model, engine_config(folder=tmp_path), groups, device=CpuDevice())[0]

    with engine(0, turned=False) as saving:
        train(saving, BATCHES[:2])
        saving.save_checkpoint(tmp_path / "saved")
        values, losses = saving.state_dict(), train(saving, BATCHES[2:])
    with engine(1, turned=True) as other:
        before = other.state_dict()
        with pytest.raises(CheckpointError, match=r"is in group 1 there and in group 0 here .*same order"):
            other.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        other.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
        assert all(torch.equal(value, values[name]) for name, value in other.state_dict().items())
    with engine(1, turned=False) as same:
        same.load_checkpoint(tmp_path / "saved")
        assert train(same, BATCHES[2:]) == losses

"""AdEMAMix in the engine: a plain loop's losses, on every tier, from and to its state dict, on two ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.rules import RULES
from infinity.tiers.device import CpuDevice
from support.ademamix import AdEMAMix
from support.configs import engine_config
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

CONSTANTS: dict[str, Any] = {
    "lr": 2e-3,
    "betas": [0.8, 0.95, 0.99],
    "alpha": 4.0,
    "t_alpha": 5,
    "t_beta3": 6,
    "eps": 1e-6,
    "weight_decay": 0.1,
}
BATCHES = token_batches(8)


def config_of(folder: Path, **options: Any) -> Config:
    base = engine_config(folder=folder, **options).model_dump(mode="json", exclude_unset=True)
    return Config.load({**base, "optimizer": {"type": "AdEMAMix", "params": CONSTANTS}})


def plainly(model: Any, optimizer: torch.optim.Optimizer, accumulation: int, clip: float, batches: Any) -> Result:
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = model(*batch)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == 0:
            if clip > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.3)])
def test_a_plain_loops_losses_on_every_tier(accumulation: int, clip: float, tmp_path: Path) -> None:
    model = seeded(Stack)
    expected = plainly(model, AdEMAMix(model.parameters(), **CONSTANTS), accumulation, clip, BATCHES)
    results = []
    for tier in ("none", "cpu", "nvme"):
        config = config_of(tmp_path, param=tier, optim=tier, accumulation=accumulation, clip=clip)
        with open_engine(seeded(Stack), config) as engine:
            results.append(Result(train(engine, BATCHES), parameters_of(engine)))
    assert_close(results[0], expected)
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize(("master", "moments"), [("remainder", "bf16"), ("fp32", "8bit")])
def test_tiers_and_tiles_give_the_same_bits(master: str, moments: str, tmp_path: Path) -> None:
    results = []
    for options in ({"param": "cpu", "optim": "cpu"}, {"param": "cpu", "optim": "nvme"}, {"tile_size": 8192}):
        config = config_of(tmp_path, bf16=True, master=master, moments=moments, **options)
        with open_engine(seeded(Stack), config) as engine:
            results.append(Result(train(engine, BATCHES), parameters_of(engine) | states_of(engine)))
    for result in results[1:]:
        assert_same(result, results[0])


def test_training_moves_from_a_plain_loop_to_an_engine_and_back(tmp_path: Path) -> None:
    plain, model = seeded(Stack), seeded(Stack, 3)
    reference = AdEMAMix(plain.parameters(), **CONSTANTS)
    plainly(plain, reference, 1, 0.0, BATCHES[:3])
    model.load_state_dict(plain.state_dict())
    saved = copy.deepcopy(reference.state_dict())
    expected = plainly(plain, reference, 1, 0.0, BATCHES[3:6])
    with open_engine(model, config_of(tmp_path)) as engine:
        engine.optimizer.load_state_dict(saved)
        found = engine.optimizer.state_dict()
        for number, state in saved["state"].items():
            assert found["state"][number].keys() == state.keys() == {"step", *RULES["ademamix"].moments}
            assert all(torch.equal(found["state"][number][name], value) for name, value in state.items())
        assert_close(Result(train(engine, BATCHES[3:6]), parameters_of(engine)), expected)
        back, parameters = engine.optimizer.state_dict(), engine.state_dict()
        engine.optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        with pytest.raises(ConfigError, match=r"betas are \(0\.9, 0\.99\): give three numbers"):
            engine.optimizer.hypers()
    again = seeded(Stack, 5)
    again.load_state_dict(parameters)
    optimizer = AdEMAMix(again.parameters())
    optimizer.load_state_dict(back)
    results = [plainly(m, o, 1, 0.0, BATCHES[6:]) for m, o in ((again, optimizer), (plain, reference))]
    assert_close(*results)


def test_a_checkpoint_goes_on_in_other_tiers_and_formats(tmp_path: Path) -> None:
    """The warm-ups go on at the step of the checkpoint; into other moments, losses stay near."""
    with open_engine(seeded(Stack), config_of(tmp_path)) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path / "saved")
        expected = Result(train(engine, BATCHES[3:]), parameters_of(engine) | states_of(engine))
    for moments in ("fp32", "8bit"):
        config = config_of(tmp_path, param="cpu", optim="cpu", moments=moments)
        with open_engine(seeded(Stack, 3), config) as engine:
            engine.load_checkpoint(tmp_path / "saved")
            losses = train(engine, BATCHES[3:])
            if moments == "fp32":
                assert_same(Result(losses, parameters_of(engine) | states_of(engine)), expected)
        assert max(abs(a - b) / b for a, b in zip(losses, expected.losses, strict=True)) < 0.02


def test_a_group_with_the_keys_of_bitsandbytes_adam_is_no_other_optimizers() -> None:
    """Its param_groups hold AdEMAMix's keys without effect, which Trainer passes to an engine of AdamW."""
    model = seeded(Stack)
    groups = [{"params": list(model.parameters()), "alpha": 0.0, "t_alpha": None, "t_beta3": None}]
    import infinity

    engine, optimizer, *_ = infinity.initialize(
        model, engine_config(param="cpu", optim="cpu"), model_parameters=groups, device=CpuDevice()
    )
    with engine:
        optimizer.load_state_dict(optimizer.state_dict())

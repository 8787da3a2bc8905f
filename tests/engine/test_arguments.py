"""Arguments of `infinity.initialize` that scripts for DeepSpeed pass."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import infinity
from infinity.engine.initialize import make_loader
from infinity.errors import ConfigError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config, raw
from support.models import Stack, seeded


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert infinity.add_config_arguments(parser) is parser
    return parser.parse_args(flags)


def test_flags() -> None:
    """The flags and their defaults are those of DeepSpeed 0.19.8."""
    assert vars(parse()) == {
        "deepspeed": False,
        "deepspeed_config": None,
        "deepscale": False,
        "deepscale_config": None,
    }
    args = parse("--deepspeed", "--deepspeed_config", "ds.json")
    assert args.deepspeed is True
    assert args.deepspeed_config == "ds.json"


@pytest.mark.parametrize("flag", ["--deepspeed_config", "--deepscale_config"])
def test_config_of_args(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw(tmp_path, gradient_clipping=0.25)))
    engine, *_ = infinity.initialize(args=parse(flag, str(path)), model=seeded(Stack), device=CpuDevice())
    with engine:
        assert engine.config.gradient_clipping == 0.25


def test_config_params(tmp_path: Path) -> None:
    config = raw(tmp_path, gradient_clipping=0.25)
    engine, *_ = infinity.initialize(seeded(Stack), config_params=config, config=dict(config), device=CpuDevice())
    with engine:
        assert engine.config.gradient_clipping == 0.25


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "there is no config: pass config"),
        ({"args": SimpleNamespace(deepspeed_config=None)}, "there is no config"),
        ({"config": {"a": 1}, "args": SimpleNamespace(deepspeed_config="x")}, "config and args.deepspeed_config are"),
        ({"config": {"a": 1}, "config_params": {"a": 2}}, "config and config_params are different configs"),
    ],
)
def test_no_config_or_several(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        infinity.initialize(seeded(Stack), device=CpuDevice(), **given)


class Mpu:
    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> None:
        return None


def test_mpu(tmp_path: Path) -> None:
    """An mpu is accepted if it does not divide the model."""
    config = engine_config(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"mpu\.get_model_parallel_world_size\(\) is 2: .*\.parallelize_module"):
        infinity.initialize(seeded(Stack), config, mpu=Mpu(2), device=CpuDevice())
    infinity.initialize(seeded(Stack), config, mpu=Mpu(1), device=CpuDevice())[0].close()


@pytest.mark.parametrize(("environment", "expected"), [(None, "29511"), ("29512", "29512")])
def test_port(environment: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`distributed_port` does not replace the launcher's port."""
    monkeypatch.setenv("MASTER_PORT", environment or "")
    if environment is None:
        monkeypatch.delenv("MASTER_PORT")
    config = engine_config(folder=tmp_path)
    infinity.initialize(seeded(Stack), config, distributed_port=29511, device=CpuDevice())[0].close()
    assert os.environ["MASTER_PORT"] == expected


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        return number


def test_collate_fn(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, micro=4)
    engine, _, loader, _ = infinity.initialize(
        seeded(Stack), config, training_data=Numbers(), collate_fn=tuple, device=CpuDevice()
    )
    with engine:
        assert loader is not None
        batches = list(loader)
        assert [len(batch) for batch in batches] == [4, 4]
        assert all(isinstance(batch, tuple) for batch in batches)


def test_a_loader_that_keeps_the_last_batch(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(seeded(Stack), engine_config(folder=tmp_path, micro=4), device=CpuDevice())
    with engine:
        loader = make_loader(Numbers(), engine, drop_last=False)
        batches = list(loader)
        assert [len(batch) for batch in batches] == [4, 4, 2] == [4] * (len(loader) - 1) + [2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))

"""The engine's configuration: the default one, and the batch size of a file's or of the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from gpt2.duration import MIN_STEPS
from gpt2.engine_config import _precision, engine_config, replace_schedule, scheduled_steps
from gpt2.options import BATCH_SIZE, JobOptions
from infinity.config import Config
from infinity.engine.schedules.client import make_scheduler
from infinity.errors import ConfigError


def written(folder: Path, **changes: Any) -> str:
    path = folder / "engine.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **changes}))
    return str(path)


def test_default_config_has_every_state_on_nvme(tmp_path: Path) -> None:
    zero = engine_config(JobOptions(nvme_path=str(tmp_path))).zero_optimization
    assert zero.offload_param.device == zero.offload_optimizer.device == "nvme"
    assert zero.offload_param.nvme_path == zero.offload_optimizer.nvme_path == (tmp_path,)


@pytest.mark.parametrize(("train_iters", "expected"), [(None, MIN_STEPS), (400, 400)])
def test_default_schedule_ends_with_the_job(train_iters: int | None, expected: int) -> None:
    assert scheduled_steps(engine_config(JobOptions(train_iters=train_iters))) == expected


@pytest.mark.parametrize(
    ("in_file", "asked", "expected"),
    [
        ({}, None, BATCH_SIZE),
        ({}, 4, 4),
        ({"train_batch_size": 6}, None, 6),
        ({"train_batch_size": 6}, 6, 6),
        ({"train_micro_batch_size_per_gpu": 2}, None, None),
        ({"train_micro_batch_size_per_gpu": 2}, 4, 4),
    ],
)
def test_batch_size_is_that_of_the_options_or_of_the_file(
    tmp_path: Path, in_file: dict[str, int], asked: int | None, expected: int | None
) -> None:
    config = engine_config(JobOptions(config=written(tmp_path, **in_file), batch_size=asked))
    assert config.train_batch_size == expected


def test_two_batch_sizes_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, train_batch_size=6)
    with pytest.raises(ConfigError, match=r"--batch-size is 4, but train_batch_size in .*engine.json is 6"):
        engine_config(JobOptions(config=file, batch_size=4))


def test_config_without_a_schedule_gives_no_number_of_steps(tmp_path: Path) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 7}}
    assert scheduled_steps(engine_config(JobOptions(config=written(tmp_path)))) is None
    assert scheduled_steps(engine_config(JobOptions(config=written(tmp_path, scheduler=schedule)))) == 7


@pytest.mark.parametrize(("emulated", "section"), [(False, "bf16"), (True, "fp16")])
def test_default_precision_of_a_gpu_is_not_emulated(
    monkeypatch: pytest.MonkeyPatch, emulated: bool, section: str
) -> None:
    def supported(*, including_emulation: bool = True) -> bool:
        return including_emulation or not emulated

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert _precision() == {section: {"enabled": True}}


@pytest.mark.parametrize("at", [0, 1, 7, 8])
@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_schedule_replaced_within_the_warmup_gives_the_rates_of_one_known_from_the_start(name: str, at: int) -> None:
    def make(total: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1e-2, 5e-3)]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = make_scheduler(optimizer, wanted(total), 1e-2)
        assert scheduler is not None
        return optimizer, scheduler

    def wanted(total: int) -> Any:
        params = {"warmup_num_steps": 8, "warmup_type": "linear", "total_num_steps": total}
        base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        return Config.load({**base, "scheduler": {"type": name, "params": params}}).scheduler

    def step(optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> list[float]:
        optimizer.step()
        scheduler.step()
        return [float(group["lr"]) for group in optimizer.param_groups]

    known, chosen = make(30), make(8)
    expected = [step(*known) for _ in range(35)]
    seen = [step(*chosen) for _ in range(at)]
    replace_schedule(chosen[1], wanted(30), 1e-2)
    assert seen + [step(*chosen) for _ in range(35 - at)] == expected

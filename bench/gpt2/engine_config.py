"""Configuration of the demo's engine: a file's, or AdamW with every state on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from gpt2.duration import MEASURED_STEPS, MIN_STEPS
from gpt2.options import BATCH_SIZE, JobOptions
from infinity.config import Config, WarmupCosineLR
from infinity.engine.precision import emulates_bf16
from infinity.engine.schedules.client import factor
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.engine.schedules.client import Warmup

WARMUP_STEPS = MEASURED_STEPS
"""A constant, since the number of all steps is chosen when these are done."""


def engine_config(options: JobOptions) -> Config:
    """Return the file's configuration or the default one, with the batch size of the options.

    Without `train_iters`, the schedule of the default one is right in its warm-up only, until `set_schedule`.
    """
    if options.config is None:
        return Config.load(_default_config(options))
    config = Config.load(options.config)
    has_batch_size = config.train_batch_size is not None or config.train_micro_batch_size_per_gpu is not None
    if options.batch_size is None and has_batch_size:
        return config
    batch_size = options.batch_size or BATCH_SIZE
    if config.train_batch_size not in (None, batch_size):
        raise ConfigError(
            f"--batch-size is {batch_size}, but train_batch_size in {options.config} is {config.train_batch_size}. "
            "Leave one of them out."
        )
    return config.model_copy(update={"train_batch_size": batch_size})


def _default_config(options: JobOptions) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(options.nvme_folder)}
    return {
        "steps_per_print": 0,  # the progress display shows it
        "train_batch_size": options.batch_size or BATCH_SIZE,
        **_precision(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        "scheduler": _default_schedule(options.train_iters or MIN_STEPS),
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"durable": options.durable},
    }


def _precision() -> dict[str, Any]:
    """Return the section of the fastest precision here: bf16, or where that is emulated fp16 on GPUs, fp32 on CPUs."""
    if torch.cuda.is_available():
        return {"fp16" if emulates_bf16(torch.device("cuda")) else "bf16": {"enabled": True}}
    return {"bf16": {"enabled": torch.ops.mkldnn._is_mkldnn_bf16_supported()}}


def _default_schedule(steps: int) -> dict[str, Any]:
    warmup = {"warmup_num_steps": min(WARMUP_STEPS, steps // 2), "warmup_type": "linear"}
    return {"type": "WarmupCosineLR", "params": {**warmup, "total_num_steps": steps, "cos_min_ratio": 0.1}}


def set_schedule(engine: TrainingEngine, steps: int) -> None:
    """Let the default configuration's schedule end at `steps`."""
    assert isinstance(engine.lr_scheduler, LambdaLR)
    schedule = WarmupCosineLR.model_validate(_default_schedule(steps))
    replace_schedule(engine.lr_scheduler, schedule, engine.config.optimizer.params.lr)


def replace_schedule(scheduler: LambdaLR, schedule: Warmup, lr: float) -> None:
    """Let a scheduler that `make_scheduler` constructed with `lr` follow another `schedule` from its next step on.

    Its rates are then those of a scheduler constructed with `schedule`. Both schedules have the same `warmup_max_lr`.
    """
    highest = getattr(schedule.params, "warmup_max_lr", None)
    whole = factor(schedule, highest if highest is not None else lr)
    scheduler.lr_lambdas = [whole] * len(scheduler.lr_lambdas)


def scheduled_steps(config: Config) -> int | None:
    """Return the number of steps until the schedule of the learning rate ends; None if it never does."""
    return getattr(config.scheduler.params, "total_num_steps", None) if config.scheduler is not None else None

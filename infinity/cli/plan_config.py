"""The config of `infinity plan`: values in place of "auto", and lines that name them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config, Fill, read_content
from infinity.config.batch import resolve_batch
from infinity.deepspeed.settings import in_dtype, load_settings
from infinity.errors import ConfigError
from infinity.inputs import show
from infinity.sim.gpt2 import PlannedModel

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_TRAINING_ARGUMENTS = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": False,
    "fp16": False,
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_num_steps": 0,
    "total_num_steps": 1000,
}
"""Defaults of transformers' TrainingArguments (5.23.0), and a number of steps, which follows from the data."""
_IN_FP32 = {"bf16.enabled=false", "fp16.enabled=false"}
_MICRO_BATCH = 8
"""Its default of per_device_train_batch_size."""
_WITHOUT_EFFECT = ("optimizer.params.", "scheduler.params.")
_FROM_MODEL = ("zero_optimization.stage3_prefetch_bucket_size",)


def load(
    file: Path | None, batch: int | None, ranks: int, model: PlannedModel | None, changes: Sequence[str] = ()
) -> Config:
    """Return the config in `file`, with TrainingArguments' defaults in place of "auto"; without a file, the default.

    A config with "auto" is one that a trainer fills, so absent keys get DeepSpeed's defaults. batch: samples of a step
    over all ranks, which replace the config's; None: the config's. model: whose width and bytes some values follow
    from; None: unknown. changes: of keys, as "bf16.enabled=true". Raises ConfigError with all problems, those of the
    batch sizes too.
    """
    content = _default(batch, ranks) if file is None else read_content(file)
    if model is not None and _IN_FP32 & {change.replace(" ", "") for change in changes}:
        model = replace(model, dtype=torch.float32)  # a script may build it so, whatever its config.json has
    for change in changes:
        _set(content, change)
    name = "" if file is None else f"{file}: "
    problems: list[str] = []
    config = None
    try:
        config = _filled(content, batch, model) if _is_for_a_trainer(content) else Config.load(content)
        if batch is not None:
            config = config.model_copy(update={"train_batch_size": batch, "train_micro_batch_size_per_gpu": None})
    except ConfigError as error:
        problems += [f"{name}{line}" for line in error.problems]
    train, micro, accumulation = sizes = tuple(content.get(key) for key in _BATCH)
    try:
        if config is not None:
            config.resolve_batch(ranks)
        elif batch is None and all(size is None or (type(size) is int and size > 0) for size in sizes):
            resolve_batch(train, micro, accumulation, ranks)
    except ConfigError as error:
        other = ". Or pass --batch-size" if batch is None else ""
        if not any("the batch sizes do not multiply" in line for line in problems):  # whatever the ranks
            problems += [f"{name}{line}{other}" for line in error.problems]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _default(batch: int | None, ranks: int) -> dict[str, Any]:
    """Return bf16 and AdamW in stage 3, with every state on nvme."""
    place = {"device": "nvme", "nvme_path": "."}
    return {
        "train_batch_size": batch or _MICRO_BATCH * ranks,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": dict(place), "offload_optimizer": dict(place)},
    }


def _set(content: dict[str, Any], change: str) -> None:
    """Set a key of the config, as `--set` has it: a full name, "=", and JSON or a text."""
    dotted, equals, text = change.partition("=")
    if not equals or not all(names := dotted.strip().split(".")):
        raise ConfigError(f"--set {change}: give a key and its value in JSON, such as bf16.enabled=true")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    *sections, name = names
    section = content
    for each in sections:
        section = section.setdefault(each, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {change}: the config has {show(section)} at {each}, and no section")
    section[name] = value


def _is_for_a_trainer(content: Mapping[str, Any]) -> bool:
    """Return whether the config has an "auto" that only a trainer fills in."""
    try:
        notes = Config.load(content, fill=Fill(**_OF_TRAINING_ARGUMENTS)).notes  # type: ignore[arg-type]
    except ConfigError:
        return True
    return bool(notes.filled or notes.defaults)


def _filled(content: Mapping[str, Any], batch: int | None, model: PlannedModel | None) -> Config:
    micro = None if batch is not None else _MICRO_BATCH
    fill = Fill(**_OF_TRAINING_ARGUMENTS, train_micro_batch_size_per_gpu=micro)  # type: ignore[arg-type]
    if model is None:
        return load_settings(content, nn.Module(), fill)
    return load_settings(in_dtype(model.dtype, content), model.module, fill)


def assumed(config: Config, dtype: torch.dtype = torch.float32) -> Iterator[str]:
    """Yield what stands in place of "auto" in the config, and the dtype that follows from the model; nothing without
    "auto". dtype: of the model's parameters in the user's script.
    """
    is_half = config.bf16.enabled or config.fp16.enabled
    if dtype != torch.float32 and is_half and config.notes.filled:
        name = str(dtype).removeprefix("torch.")
        yield (
            f"the model's config.json has {name}, in which from_pretrained loads it and a Trainer trains it. If your "
            "script builds it in fp32, pass --set bf16.enabled=false"
        )
    filled = [(key, value) for key, value in config.notes.filled if key not in _FROM_MODEL]
    values = [f"{key} {show(value)}" for key, value in filled if not key.startswith(_WITHOUT_EFFECT)]
    default = [key for key in config.notes.defaults if key not in _BATCH]
    example = ", such as --set bf16.enabled=true" if ("bf16.enabled", False) in filled else " by --set"
    if values:
        yield (
            f'assumed in place of "auto": {", ".join(values)} (TrainingArguments\' defaults). If your script sets '
            f"others, pass them{example}"
        )
    if default:
        yield f'assumed in place of "auto": the default of {", ".join(default)}'
    if len(values) < len(filled):
        yield '"auto" in optimizer.params and scheduler.params changes neither bytes nor seconds'

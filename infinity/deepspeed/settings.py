"""Reads DeepSpeed's configs: from arguments, a dict or a file, with DeepSpeed's defaults.

Errors where DeepSpeed has an `assert` or raises a ValueError, for scripts that catch these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.deepspeed.engine_names import read
from infinity.deepspeed.front_ends import check_folders
from infinity.errors import ConfigError, ModelError, RanksError, StorageError, UsageError
from infinity.observe.log import logger

if TYPE_CHECKING:
    from infinity.config import Config, Fill


def read_settings(source: Mapping[str, Any] | str | PathLike[str]) -> dict[str, Any]:
    """Return the config as a dict of DeepSpeed's keys. Raises ConfigError if it is neither a dict nor a JSON file."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, PathLike)):
        raise ConfigError(f"a DeepSpeed config is a dict or the path of a JSON file, not a {type(source).__name__}")
    from infinity.config import read_content

    return read_content(Path(source))


def make_config(settings: Mapping[str, Any], model: nn.Module) -> Config:
    """Return the engine's config for DeepSpeed's `settings`, as `load_settings` does, and create `nvme_path`."""
    config = load_settings(settings, model)
    for folder in map(Path, config.zero_optimization.nvme_paths):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"nvme_path: {folder} cannot be created: {error.strerror}. Create it, or name another folder."
            ) from None
    return config


def load_settings(settings: Mapping[str, Any], model: nn.Module, fill: Fill | None = None) -> Config:
    """Return the engine's config for DeepSpeed's `settings`, with DeepSpeed's defaults.

    In stages 0 to 2 parameters hold their values between steps: units stay in memory, and `step` returns after all
    updates. Keys of the section `infinity` override both. fill: values for keys that are "auto", besides those that
    follow from the model.
    """
    from infinity.config import Config, Fill, hidden_size_of  # here, since pydantic takes long to import

    settings = dict(settings)
    check_folders(settings)
    if settings.get("steps_per_print") == math.inf:  # as Accelerate switches the lines off
        settings["steps_per_print"] = 0
    fill = replace(fill or Fill(), hidden_size=hidden_size_of(model))
    config = Config.load(settings, dialect="deepspeed", fill=fill)
    if config.zero_optimization.stage < 3:
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        resident = {"cache_bytes": 2 * nbytes + (1 << 20), "update": "after_backward"}
        content = {**settings, "infinity": {**resident, **(settings.get("infinity") or {})}}
        config = Config.load(content, dialect="deepspeed", fill=fill)
    return config


def in_dtype_of(model: nn.Module, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `settings`, with bf16 or fp16 enabled if all parameters of `model` have it and no section is enabled.

    DeepSpeed trains such a model in its dtype. fp16 then has no loss scale, as there.
    """
    found = in_dtype(dtype_of(model), settings)
    if found is not settings:
        logger.info("the model's parameters are in 16 bits, so %s.enabled is true", _SECTION_OF[dtype_of(model)][0])
    return found


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of all floating-point parameters; fp32 if they have several."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def in_dtype(dtype: torch.dtype, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `settings`, with bf16 or fp16 enabled for parameters of that dtype, if no section is enabled."""
    switches = ("bf16", "bfloat16", "fp16", "torch_autocast")
    if dtype not in _SECTION_OF or any(read(settings, f"{name}.enabled") is True for name in switches):
        return settings
    name, keys = _SECTION_OF[dtype]
    return {**settings, name: {**(settings.get(name) or {}), **keys}}


_SECTION_OF: dict[torch.dtype, tuple[str, dict[str, Any]]] = {
    torch.bfloat16: ("bf16", {"enabled": True}),
    torch.float16: ("fp16", {"enabled": True, "loss_scale": 1}),
}


def tag_validation(settings: Mapping[str, Any]) -> str:
    """Return what happens if ranks save under different tags: "WARN", "IGNORE" or "FAIL". Raises ConfigError."""
    mode = read(settings, "checkpoint.tag_validation", "WARN")
    if not isinstance(mode, str) or mode.upper() not in ("WARN", "IGNORE", "FAIL"):
        raise ConfigError(f'checkpoint.tag_validation: must be "Ignore", "Warn" or "Fail", not {mode!r}')
    return mode.upper()


def without_auto_schedule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without a scheduler whose length is "auto", since only `initialize` may know it."""
    schedule = settings.get("scheduler")
    params = schedule.get("params") if isinstance(schedule, Mapping) else None
    is_auto = isinstance(params, Mapping) and params.get("total_num_steps") == "auto"
    return {key: value for key, value in settings.items() if not (is_auto and key == "scheduler")}


class FailedConfigCheck(ConfigError, AssertionError):
    """A ConfigError, and an AssertionError as in DeepSpeed."""


class FailedModelCheck(ModelError, AssertionError):
    """A ModelError, and an AssertionError as in DeepSpeed."""


class FailedRanksCheck(RanksError, AssertionError):
    """A RanksError, and an AssertionError as in DeepSpeed."""


class FailedUsageCheck(UsageError, AssertionError):
    """A UsageError, and an AssertionError as in DeepSpeed."""


class WrongValue(UsageError, ValueError):
    """A UsageError, and a ValueError as in DeepSpeed."""


@contextmanager
def usage_checks() -> Iterator[None]:
    """Raise a UsageError of the block as FailedUsageCheck."""
    try:
        yield
    except UsageError as error:
        raise FailedUsageCheck(str(error)) from error


@contextmanager
def config_checks() -> Iterator[None]:
    """Raise a ConfigError of the block as FailedConfigCheck."""
    problems: tuple[str, ...] = ()
    try:
        yield
    except ConfigError as error:
        problems = error.problems
    if problems:
        raise FailedConfigCheck(problems)

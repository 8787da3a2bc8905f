"""Reads DeepSpeed's configs: from arguments, a dict or a file, with DeepSpeed's defaults."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.config import Config


def read_settings(source: Mapping[str, Any] | str | PathLike[str]) -> dict[str, Any]:
    """Return the config as a dict of DeepSpeed's keys. Raises ConfigError if it is neither a dict nor a JSON file."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, PathLike)):
        raise ConfigError(f"a DeepSpeed config is a dict or the path of a JSON file, not a {type(source).__name__}")
    from infinity.config import read_content

    return read_content(Path(source))


def make_config(settings: Mapping[str, Any], model: nn.Module) -> Config:
    """Return the engine's config for DeepSpeed's `settings`, with DeepSpeed's defaults, and create `nvme_path`.

    In stages 0 to 2 parameters hold their values between steps: units stay in memory, and `step` returns after all
    updates. Keys of the section `infinity` override both.
    """
    from infinity.config import Config, Fill, hidden_size_of  # here, since pydantic takes long to import

    settings = dict(settings)
    if settings.get("steps_per_print") == math.inf:  # as Accelerate switches the lines off
        settings["steps_per_print"] = 0
    fill = Fill(hidden_size=hidden_size_of(model))
    config = Config.load(settings, dialect="deepspeed", fill=fill)
    if config.zero_optimization.stage < 3:
        content = {**settings, "infinity": _resident(model) | dict(settings.get("infinity") or {})}
        config = Config.load(content, dialect="deepspeed", fill=fill)
    for folder in config.zero_optimization.nvme_paths:
        Path(folder).mkdir(parents=True, exist_ok=True)
    return config


def without_auto_schedule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without a scheduler whose length is "auto", since only `initialize` may know it."""
    schedule = settings.get("scheduler")
    params = schedule.get("params") if isinstance(schedule, Mapping) else None
    is_auto = isinstance(params, Mapping) and params.get("total_num_steps") == "auto"
    return {key: value for key, value in settings.items() if not (is_auto and key == "scheduler")}


def _resident(model: nn.Module) -> dict[str, Any]:
    """Return keys of section `infinity` that keep all parameters of `model` readable between steps."""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"cache_bytes": 2 * nbytes + (1 << 20), "update": "after_backward"}

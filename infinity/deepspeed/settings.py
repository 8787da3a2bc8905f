"""Reads DeepSpeed's configs: from arguments, a dict or a file, with DeepSpeed's defaults."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError

CLIPPING = 1.0
"""DeepSpeed's `gradient_clipping` if the config has none, since June 2026."""


_READ_BY_ENGINE = {
    "": ("dataloader_drop_last", "zero_allow_untested_optimizer"),
    "zero_optimization": (
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    ),
}
"""Section → keys that only the engine of `infinity.deepspeed` reads, from its dict of settings."""


def find_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the config among `initialize`'s arguments. Raises ConfigError if there is none, or two."""
    flags = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    given = [value for value in (*flags, config if config is not None else config_params) if value is not None]
    if len(given) != 1:
        problem = "has no config" if not given else "has a config in args.deepspeed_config and another as argument"
        raise ConfigError(f"initialize() {problem}: pass one, as config={{…}} or with --deepspeed_config FILE")
    return given[0]


def read_settings(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return the config as a dict of DeepSpeed's keys. Raises ConfigError if it is no dict and no readable JSON."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"a DeepSpeed config is a dict or the path of a JSON file, not a {type(source).__name__}")
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read as DeepSpeed config: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: must hold one JSON object, {{ … }}, not a {type(content).__name__}")
    return content


def make_config(settings: Mapping[str, Any], model: nn.Module) -> Config:
    """Return the engine's config for DeepSpeed's `settings`, with DeepSpeed's defaults, and create `nvme_path`.

    In stages 0 to 2 parameters hold their values between steps: units stay in memory, and `step` returns after all
    updates. Keys of the section `infinity` override both.
    """
    content = _without_nulls(settings)
    content.setdefault("gradient_clipping", CLIPPING)
    if content.get("steps_per_print") == math.inf:  # as Accelerate switches the lines off
        content["steps_per_print"] = 0
    if "optimizer" in content:
        content["optimizer"] = _optimizer(content["optimizer"])
    zero = content.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        zero.setdefault("stage", 0)
        if zero["stage"] in (0, 1, 2):
            content["infinity"] = _resident(model) | content.get("infinity", {})
    for section, names in _READ_BY_ENGINE.items():
        part: Any = content.get(section) if section else content
        for name in names if isinstance(part, dict) else ():
            part.pop(name, None)
    config = Config.load(content)
    for folder in config.zero_optimization.nvme_paths:
        Path(folder).mkdir(parents=True, exist_ok=True)
    return config


def _without_nulls(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `section` without keys that are null, which have their defaults in DeepSpeed."""
    kept = {key: value for key, value in section.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _optimizer(section: Any) -> Any:
    """Return section `optimizer` with the defaults of DeepSpeed's own optimizers, which differ from torch.optim's.

    DeepSpeed's Adam decouples its decay unless `adam_w_mode` is false, and its AdamW decays by 0 unless `torch_adam`.
    """
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        return section
    kind, params = str(section.get("type", "")).lower(), dict(section.get("params", {}))
    if kind in ("adam", "adamw"):
        of_torch = params.pop("torch_adam", False)
        kind = "AdamW" if kind == "adamw" or params.get("adam_w_mode", True) else "Adam"
        params.pop("adam_w_mode", None)
        params.setdefault("weight_decay", 0.01 if kind == "AdamW" and of_torch else 0.0)
    elif kind == "lion":
        params = {"lr": 1e-3, "betas": [0.9, 0.999], **params}
    else:
        return section
    return {**section, "type": kind, "params": params}


def _resident(model: nn.Module) -> dict[str, Any]:
    """Return keys of section `infinity` that keep all parameters of `model` readable between steps."""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"cache_bytes": 2 * nbytes + (1 << 20), "update": "after_backward"}

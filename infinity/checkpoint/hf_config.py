"""Writes the dtype of exported weights into config.json.

`from_pretrained(folder)` casts the weights to the dtype in config.json, so a wrong one would change the outputs of the
model. transformers 5 calls the key `dtype`, transformers 4 `torch_dtype`. Composite models nest one config per part,
each with a dtype of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.errors import UsageError
from infinity.inputs import parse_json, read_input

CONFIG = "config.json"
_KEYS = ("dtype", "torch_dtype")


def with_dtype(file: Path, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """Return the content of `file`, a config.json, with the dtype of these weights in it, encoded as UTF-8.

    dtypes: name of each floating-point parameter → its dtype. Raises UsageError if `file` holds no JSON object, or if
    the weights have several dtypes: a config names only one.
    """
    try:
        config = parse_json(read_input(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}): pass a folder with the model's config.json") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object: pass a folder with the model's config.json")
    first_names: dict[torch.dtype, str] = {}
    for name, dtype in dtypes.items():
        first_names.setdefault(dtype, name)
    if len(first_names) > 1:
        examples = ", ".join(f"{name} is {_named(dtype)}" for dtype, name in first_names.items())
        raise UsageError(
            f"the parameters compute in several dtypes ({examples}), but {CONFIG} holds one, to which from_pretrained "
            "casts all of them. Choose it with --dtype (dtype=), or export without --config-from (config_from=)."
        )
    for dtype in first_names:
        _set(config, _named(dtype))
        if not any(key in config for key in _KEYS):
            config[_KEYS[0]] = _named(dtype)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _set(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if key in _KEYS:
            if value is None or isinstance(value, (str, dict)):
                config[key] = dtype
        elif isinstance(value, dict) and _is_config(key, value):
            _set(value, dtype)


def _is_config(key: str, value: dict[str, Any]) -> bool:
    """True if `value` is the config of a part of the model. Other objects (a vocabulary) may hold such keys too."""
    return "model_type" in value or (key.endswith("_config") and key != "quantization_config")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

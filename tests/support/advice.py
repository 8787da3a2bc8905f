"""Advice of an OutOfMemoryError and of `infinity plan`, followed as a user would."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

VALUE = re.compile(r'(?:set|and|,) infinity\.((?:\w+\.)*\w+) to ("[^"]*"|\d+(?:\.\d+)?)')
MICRO = re.compile(r"use a micro-batch of (\d+) with gradient_accumulation_steps (\d+)")
DEVICE = re.compile(r"give ([\w, ]+?) the device (\w+) \(zero_optimization\)")


def followed(content: dict[str, Any], advice: str, folder: Path) -> dict[str, Any]:
    """Return `content` with the first change that `advice` names, as a user would write it."""
    changed = deepcopy(content)
    advice = advice.partition(", or ")[2] if advice.startswith("raise ") else advice
    for sections, device in DEVICE.findall(advice):
        for section in sections.split(" and "):
            changed["zero_optimization"][section] = {"device": device, "nvme_path": str(folder)}
    for micro, accumulation in MICRO.findall(advice):
        changed |= {"train_micro_batch_size_per_gpu": int(micro), "gradient_accumulation_steps": int(accumulation)}
    for key, value in VALUE.findall(advice):
        *path, last = key.split(".")
        section = changed.setdefault("infinity", {})
        for name in path:
            section = section.setdefault(name, {})
        section[last] = json.loads(value)
    return changed


def merged(content: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the keys of `changed`, which `infinity plan` prints as JSON."""
    result = deepcopy(content)
    for key, value in changed.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if inner else value
    return result

"""Hyper-parameters and schedules as values of JSON, and back.

JSON has no tuples, no numbers of numpy, and only texts as keys. Dicts with other keys, such as the milestones of
torch's MultiStepLR, become {"__items__": [[key, value], …]}.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import torch

from infinity.errors import CheckpointError

_ITEMS = "__items__"


def to_plain(value: Any, name: str) -> Any:
    """Return a copy of `value` that JSON preserves. name: for messages.

    Raises CheckpointError if it holds something else than numbers, texts, None, and lists, tuples and dicts of them.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return to_plain(value.item(), name)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(each, f"{name}.{key}") for key, each in value.items()}
        keys = [to_plain(key, f"a key of {name}") for key in value]
        if not any(isinstance(key, (list, dict)) for key in keys):
            values = [to_plain(each, f"{name}[{key!r}]") for key, each in value.items()]
            return {_ITEMS: [list(pair) for pair in zip(keys, values, strict=True)]}
    if isinstance(value, (list, tuple)):
        return [to_plain(each, f"{name}[{number}]") for number, each in enumerate(value)]
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be saved: use only numbers, texts, and lists, tuples and "
        "dicts of them"
    )


def from_plain(saved: Any, present: Any) -> Any:
    """Return the value of `to_plain`. present: the value that it replaces, whose tuples and Counters it has."""
    if isinstance(saved, dict):
        by_key = present if isinstance(present, Mapping) else {}
        found = {key: from_plain(value, by_key.get(key)) for key, value in _items(saved)}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(saved, list):
        known = present if isinstance(present, (list, tuple)) and len(present) == len(saved) else repeat(None)
        values = [from_plain(value, each) for value, each in zip(saved, known, strict=False)]
        return tuple(values) if isinstance(present, tuple) else values
    return saved


def _items(saved: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a dict of `to_plain`; those of `saved` itself if it was altered to be none."""
    pairs = saved.get(_ITEMS)
    if len(saved) == 1 and isinstance(pairs, list) and all(map(_is_pair, pairs)):
        return [(key, value) for key, value in pairs]
    return saved.items()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and not isinstance(value[0], (list, dict))

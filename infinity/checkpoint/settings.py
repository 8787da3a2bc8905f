"""Compares the hyper-parameters and counters of an index with those of the engine that loads it, before any change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.checkpoint.format import Index
from infinity.checkpoint.parts import Run
from infinity.errors import CheckpointError

_KINDS: dict[str, tuple[type, ...]] = {
    "truth value": (bool,),
    "number": (int, float),
    "text": (str,),
    "list": (list, tuple),
    "section": (dict,),
}


def check_settings(run: Run, index: Index, folder: Path) -> None:
    """Raise CheckpointError if a saved value is of another kind than the present one. None is of every kind."""
    pairs = zip(run.param_groups, index.param_groups, strict=True)
    for name, present, saved in (
        *((f"param_groups[{number}]", *pair) for number, pair in enumerate(pairs)),
        ("lr_scheduler", run.lr_scheduler or {}, index.lr_scheduler or {}),
        ("loss_scale", run.loss_scale or {}, index.loss_scale or {}),
    ):
        for key, value in saved.items():
            for problem in _problems(present.get(key), value, finite=name.startswith("param_groups")):
                raise CheckpointError(f"{folder} is damaged: {name}.{key} {problem}; use another checkpoint")


def _problems(present: Any, saved: Any, *, finite: bool) -> Iterator[str]:
    """finite: numbers must be."""
    if finite and isinstance(saved, float) and not math.isfinite(saved):
        yield f"is {saved}"
    if None in (present, saved):
        return
    if _kind(present) != _kind(saved):
        yield f"is {saved!r:.40}, which is no {_kind(present)}"
    elif isinstance(saved, list) and present:
        for value in saved:
            yield from _problems(present[0], value, finite=finite)


def _kind(value: object) -> str:
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), "value")

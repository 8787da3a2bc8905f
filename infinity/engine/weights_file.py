"""Writes a model's weights to one file, which `torch.load` or safetensors reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from infinity.errors import CheckpointError
from infinity.observe.log import logger

Weights = Iterable[tuple[str, torch.Tensor]]


def write_weights(weights: Weights, target: Path, *, writes: bool) -> None:
    """Write (name, value) pairs to `target`: as safetensors if it ends in .safetensors, else by `torch.save`.

    Reads `weights` to the end, which may be collective. writes: False on ranks that write nothing. The file appears
    complete or not at all. Raises CheckpointError if it cannot be written.
    """
    if not writes:
        for _ in weights:
            pass
        return
    whole = dict(weights)
    part = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".safetensors":
            save_file(_unshared(whole), part, metadata={"format": "pt"})
        else:
            torch.save(whole, part)
        os.replace(part, target)
    except Exception as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CheckpointError(f"the weights {target} could not be written: {error}") from error
    logger.info("weights of the model written to %s", target)


def _unshared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without further names of a shared one, which safetensors refuses; the first name stays."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in weights.items():
        kept.setdefault(id(value), (name, value.contiguous()))
    return dict(kept.values())

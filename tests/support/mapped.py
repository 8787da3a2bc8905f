"""Finds tensors in mapped files, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

PAGE = 4096


def in_file(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's memory is a mapping of an anonymous file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, rest = line.partition(" ")
        start, stop = (int(part, 16) for part in place.split("-"))
        if start <= tensor.data_ptr() < stop:
            return rest.endswith("(deleted)")
    raise AssertionError("the tensor is nowhere in memory")


def kept(parameters: Iterable[nn.Parameter]) -> float:
    """Return the fraction of these parameters' bytes that is in a file, without tiny ones."""
    large = [parameter for parameter in parameters if parameter.nbytes >= PAGE]
    return sum(p.nbytes for p in large if in_file(p)) / sum(p.nbytes for p in large)

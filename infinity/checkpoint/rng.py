"""The random-number generators of every rank: torch's of host and device, Python's and numpy's."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from infinity.comm.collectives import Ranks
from infinity.errors import CheckpointError
from infinity.observe.log import logger

FILE = "rng.pt"


def pack_states(ranks: Ranks, device: torch.device) -> bytes:
    """The file's content, on every rank: the states of all of them. Every rank calls it."""
    own = _packed(_states(device))
    numbers = range(ranks.size)
    sizes = ranks.sums(*(float(len(own)) if number == ranks.rank else 0.0 for number in numbers))
    packed = []
    for number, size in zip(numbers, sizes, strict=True):
        flat = torch.zeros(int(size), dtype=torch.uint8)
        if number == ranks.rank:
            flat.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        ranks.broadcast(flat, source=number)
        packed.append(flat)
    return _packed(packed)


def read_states(file: Path, ranks: Ranks) -> dict[str, Any] | None:
    """What this rank's generators were in; None if the file was saved before there were any, or by more or fewer
    ranks.
    """
    try:
        packed = torch.load(file, weights_only=True)
        if len(packed) == ranks.size:
            own: dict[str, Any] = torch.load(io.BytesIO(packed[ranks.rank].numpy().tobytes()), weights_only=True)
            return own
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - torch.load raises many classes
        raise CheckpointError(f"{file} cannot be read ({error}): the checkpoint is damaged, use another one") from None
    if ranks.rank == 0:
        logger.info("random-number states of %d ranks are not restored on %d", len(packed), ranks.size)
    return None


def restore_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, words, *rest = states["numpy"]
    numpy.random.set_state((kind, words.numpy().astype(numpy.uint32), *rest))


def _states(device: torch.device) -> dict[str, Any]:
    """As tensors and numbers, which load without running code."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": (version, torch.tensor(words), gauss),
        "numpy": (str(kind), torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest),
    }


def _packed(content: Any) -> bytes:
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()

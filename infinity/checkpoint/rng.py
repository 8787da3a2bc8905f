"""RNG states of every rank: torch's for host and device, Python's and numpy's."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from infinity.checkpoint.format import reason
from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError
from infinity.observe.log import logger

FILE = "rng.pt"


def pack_states(channel: SideChannel, device: torch.device) -> bytes:
    """Return the content of the file, the states of all ranks, on every rank. Collective."""
    packed = channel.gather(_packed(_states(device)))
    return _packed([torch.frombuffer(bytearray(own), dtype=torch.uint8) for own in packed])


def read_states(file: Path, ranks: Communicator) -> dict[str, Any] | None:
    """Return this rank's saved states; None if the checkpoint has none or was saved by another number of ranks."""
    try:
        packed = torch.load(file, weights_only=True)
        if len(packed) == ranks.size * ranks.model.size:
            content = packed[ranks.model.number * ranks.size + ranks.rank]
            own: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
            return own
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - torch.load raises many classes
        raise CheckpointError(
            f"{file} cannot be read ({reason(error)}): the checkpoint is damaged, use another one"
        ) from None
    if ranks.is_main_rank:
        size = ranks.size * ranks.model.size
        logger.info("RNG states were saved on %d ranks and are not restored on %d", len(packed), size)
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
    """Return the states as tensors and numbers, which torch.load reads with weights_only."""
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

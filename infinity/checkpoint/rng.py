"""RNG states of every rank: torch's for host and device, Python's and numpy's."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from infinity.checkpoint.archive import load_values, read_values
from infinity.checkpoint.format import reason
from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError
from infinity.observe.log import logger

FILE = "rng.pt"


def pack_states(channel: SideChannel, device: torch.device) -> bytes:
    """Return the content of the file, the states of all ranks, on every rank. Collective."""
    packed = channel.gather(pack(own_states(device)))
    return pack([torch.frombuffer(bytearray(own), dtype=torch.uint8) for own in packed])


def unpack(packed: bytes, path: Path) -> dict[str, Any]:
    """Return what `pack` packed. path: for the CheckpointError of damaged bytes."""
    try:
        return dict(read_values(io.BytesIO(packed), path))
    except Exception as error:  # noqa: BLE001 - the unpickler raises many classes
        raise CheckpointError(f"{path} cannot be read ({reason(error)}): it is damaged") from None


def unpack_states(packed: bytes, path: Path) -> dict[str, Any]:
    """Return one rank's states. path: for the CheckpointError of bytes that are none."""
    own = unpack(packed, path)
    try:
        _check(own)
    except Exception as error:  # noqa: BLE001 - generators raise many classes
        raise CheckpointError(f"{path} holds no states of generators ({reason(error)}): it is damaged") from None
    return own


def read_states(file: Path, ranks: Communicator) -> dict[str, Any] | None:
    """Return this rank's saved states; None if the checkpoint has none or was saved by another number of ranks.

    Raises CheckpointError if they are no states of generators.
    """
    try:
        packed = load_values(file)
    except FileNotFoundError:
        return None
    if isinstance(packed, list) and len(packed) != ranks.size * ranks.model.size:
        note_unrestored(len(packed), ranks)
        return None
    try:
        content = packed[ranks.model.number * ranks.size + ranks.rank]
        if content.dtype != torch.uint8 or content.dim() != 1 or not content.is_contiguous():
            raise CheckpointError("a rank's states are no bytes")
        own: dict[str, Any] = read_values(io.BytesIO(content.numpy().tobytes()), file)
        _check(own)
        return own
    except Exception as error:  # noqa: BLE001 - the unpickler and generators raise many classes
        raise CheckpointError(
            f"{file} cannot be read ({reason(error)}): the checkpoint is damaged, use another one"
        ) from None


def note_unrestored(saved: int, ranks: Communicator) -> None:
    """Log that states of another number of ranks are not restored."""
    if ranks.is_main_rank:
        size = ranks.size * ranks.model.size
        logger.info("RNG states were saved on %d ranks and are not restored on %d", saved, size)


def _check(states: dict[str, Any]) -> None:
    """Set generators of this function's own to the states. Raises errors of many classes."""
    torch.Generator().set_state(states["torch"])
    cuda = states["cuda"]
    if cuda is not None and (cuda.dtype != torch.uint8 or cuda.dim() != 1 or not 8 <= cuda.numel() <= 4096):
        raise CheckpointError("the state of CUDA's generator has another size")
    random.Random().setstate(_of_python(states))
    kind, words, place, *_ = state = _of_numpy(states)
    # numpy compares neither with its array, from which it would then read beyond the end.
    if kind != "MT19937" or words.shape != (624,) or not isinstance(place, int) or not 0 <= place <= 624:
        raise CheckpointError("the state of numpy's generator is none of MT19937")
    numpy.random.RandomState().set_state(state)


def _of_python(states: dict[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = states["python"]
    return version, tuple(words.tolist()), gauss


def _of_numpy(states: dict[str, Any]) -> tuple[Any, ...]:
    kind, words, *rest = states["numpy"]
    return kind, words.numpy().astype(numpy.uint32), *rest


def restore_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    random.setstate(_of_python(states))
    numpy.random.set_state(_of_numpy(states))


def own_states(device: torch.device) -> dict[str, Any]:
    """Return the states as tensors and numbers, which torch.load reads with weights_only."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": (version, torch.tensor(words), gauss),
        "numpy": (str(kind), torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest),
    }


def pack(content: Any) -> bytes:
    """Return the bytes of tensors, numbers and containers of them."""
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()

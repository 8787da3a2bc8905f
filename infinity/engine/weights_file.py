"""Writes a model's weights to one file, which `torch.load` or safetensors reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from infinity.comm.agreement.announcements import Operation
from infinity.engine.base import BaseEngine
from infinity.errors import CheckpointError
from infinity.inputs import replacing
from infinity.model import bitsandbytes
from infinity.nn.pieces import Pieces
from infinity.observe.log import logger
from infinity.units.compiled import own_name
from infinity.units.stored import is_wrapper

Weights = Iterable[tuple[str, torch.Tensor]]


def save_weights(engine: BaseEngine, folder: str | Path, name: str, exclude_frozen: bool) -> bool:
    """Write the state_dict of the engine's model, unsharded, to folder/name, and return True. Collective.

    exclude_frozen: leave out parameters that do not require gradients. Raises CheckpointError on all ranks if the file
    cannot be written.
    """
    pieces, named = Pieces(engine.module), list(engine.module.named_parameters(remove_duplicate=False))
    leaves_out = engine.left_out(exclude_frozen)
    names = {pieces.of(own_name(name), p).name: leaves_out(p) for name, p in named}
    layers = bitsandbytes.quantised(engine.module)
    hidden = tuple(f"{path}." for path, layer in layers if leaves_out(layer.get_parameter("weight")))

    def is_written(name: str) -> bool:
        # A quantised layer shows more than its parameters.
        return not names[name] if name in names else not name.startswith(hidden)

    engine.begin_together(Operation.SAVE_WEIGHTS)
    weights = ((name, value) for name, value in engine.stream_state_dict() if is_written(name))
    target, error = Path(folder) / name, None
    try:
        write_weights(weights, target, writes=engine.ranks.is_main_rank)
    except CheckpointError as caught:  # raised below, once all ranks know
        error = caught
    [failed] = engine.ranks.totals(float(error is not None))
    if failed:
        raise error or CheckpointError(f"the weights {target} could not be written: see the error of rank 0")
    return True


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
    wrapped = next((name for name, value in whole.items() if is_wrapper(value)), None)
    if wrapped is not None and target.suffix == ".safetensors":
        raise CheckpointError(
            f"{wrapped} is a {type(whole[wrapped]).__name__}, and {target} cannot hold tensor subclasses: pass "
            "exclude_frozen_parameters=True to write the trained parameters alone, or a file name that ends in .pt"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            if target.suffix == ".safetensors":
                save_file(_unshared(whole), file, metadata={"format": "pt"})
            else:
                torch.save(whole, file)
    except Exception as error:
        raise CheckpointError(f"the weights {target} could not be written: {error}") from error
    logger.info("weights of the model written to %s", target)


def _unshared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without further names of a shared one, which safetensors refuses; the first name stays."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in weights.items():
        kept.setdefault(id(value), (name, value.contiguous()))
    return dict(kept.values())

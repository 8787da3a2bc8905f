"""Saves a checkpoint: one safetensors file per unit, with one unit in memory at a time, or copies of a durable run's
files. The checkpoint appears complete or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.agree import target_of, together
from infinity.checkpoint.background import Saver, Saving
from infinity.checkpoint.committed import Committed
from infinity.checkpoint.format import CLIENT_STATE, reason
from infinity.checkpoint.parts import ModelParts, Run
from infinity.checkpoint.pickles import read_values
from infinity.checkpoint.snapshot import capture
from infinity.checkpoint.write import choose_committed, write_committed, write_states
from infinity.checkpoint.writer import Writer
from infinity.errors import CheckpointError, ChecksumError, RanksError
from infinity.interrupts import uninterrupted
from infinity.tiers.device import Device


def save(
    parts: ModelParts,
    saver: Saver,
    model: nn.Module,
    run: Run,
    directory: str | Path,
    tag: str | None,
    client_state: dict[str, Any],
    *,
    background: bool = False,
    latest: bool = True,
    leaves_out: Callable[[nn.Parameter], bool] = lambda parameter: False,
    committed: Committed | None = None,
) -> Path:
    """Write directory/tag and return its path. Collective; all states must be in their tiers, and rank 0 writes.

    Peak memory is a few times one unit's states. tag: None means "global_step<N>". background: return once everything
    except the states of units is captured; `saver` completes the save. latest: update the file `latest`.
    leaves_out: returns True for a parameter to omit. committed: the present states in files of a durable run, which
    are copied if every rank has them; otherwise states are read from their tiers. Raises on every rank: RanksError if
    ranks pass different folders, CheckpointError if writing failed. The previous checkpoint is untouched then.
    """
    tag = f"global_step{run.global_steps}" if tag is None else tag
    target = target_of(parts.ranks, directory, tag, background)
    channel = saver.channel(parts.ranks)
    packed = together(channel, partial(pack_client_state, client_state))
    writer = Writer(target.parent, target.name) if channel.writes else None
    started = False
    try:
        together(channel, lambda: writer.open() if writer is not None else None)
        snapshot = capture(parts, model, run, channel, packed, latest=latest, leaves_out=leaves_out)
        states = replace(parts.states, ranks=channel)
        write = partial(write_states, snapshot, states, channel, writer)
        layouts = [unit.layout for unit in parts.units]
        copying = choose_committed(channel, committed, snapshot, layouts, writer)
        if copying is not None:
            write = partial(write_committed, snapshot, copying, channel, writer)
        if background:
            saving = Saving(target, (unit.index for unit in parts.units))
            with uninterrupted():
                # Writes to a unit's states wait until the save has read them.
                if copying is not None:
                    copying.committed.keep(saving.snapshot_read)
                else:
                    for unit in parts.units:
                        unit.write_after(saving.snapshot_read(unit.index))
                saver.start(saving, partial(_write_beside, write, states.device, writer))
                started = True
        else:
            write(lambda unit: None)
    except BaseException as error:
        if writer is not None and not started:
            writer.remove()
        if isinstance(error, Exception) and not isinstance(error, (ChecksumError, RanksError)):
            raise CheckpointError(
                f"the checkpoint {target} could not be written: {str(error) or type(error).__name__}"
            ) from error
        raise
    return target


def _write_beside(
    write: Callable[[Callable[[int], None]], None], device: Device, writer: Writer | None, saving: Saving
) -> None:
    """Write all files while training continues. Holds no reference to model or engine, which may be freed meanwhile."""

    def release_unit(unit: int) -> None:
        saving.release_unit(unit)
        saving.check_stopped()

    device.enter_thread()
    try:
        write(release_unit)
    except BaseException:
        if writer is None or not writer.whole:  # otherwise another rank was lost after the checkpoint was complete
            raise
    finally:
        if writer is not None:
            writer.remove()


def pack_client_state(client_state: dict[str, Any]) -> bytes:
    """Return the pickled client_state. Loads it once, so that no unreadable checkpoint replaces a readable one."""
    if not isinstance(client_state, dict):
        raise CheckpointError(
            f"client_state is a {type(client_state).__name__}: pass a dict, such as {{'epoch': 3}}, which "
            "load_checkpoint() returns."
        )
    packed = io.BytesIO()
    try:
        torch.save(client_state, packed)
        read_values(packed, Path(CLIENT_STATE))
    except Exception as error:  # noqa: BLE001 - pickling runs any class's code
        raise CheckpointError(
            f"client_state cannot be saved for a safe load ({reason(error)}): use only tensors, numbers, strings, and "
            "lists, tuples and dicts of them"
        ) from None
    return packed.getvalue()

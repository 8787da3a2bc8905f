"""Save: one safetensors file per unit, written while no other unit is in memory; the checkpoint appears whole or
not at all.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint import rng
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, INDEX, LATEST, Entry, Index, key, persistent_buffers, view
from infinity.checkpoint.tensors import FileRecord, Spec, write_bytes, write_tensors
from infinity.errors import CheckpointError
from infinity.optim.formats import StateKind
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.engine import Engine


def save(engine: Engine, directory: Path, tag: str, client_state: dict[str, Any]) -> Path:
    """Write directory/tag. All ranks call it; rank 0 writes. Peak memory: a few times one unit's states.

    Raises CheckpointError on every rank if writing failed on the first; then the former checkpoint is untouched.
    """
    if not tag or tag != Path(tag).name:
        raise CheckpointError(f"tag {tag!r} must be the name of a folder, without slashes")
    packed = _pack(client_state)
    writer = _Writer(directory, tag) if engine.ranks.rank == 0 else None
    try:
        return _save(engine, directory / tag, writer, packed)
    except BaseException:
        if writer is not None:
            writer.remove()
        raise


def _save(engine: Engine, target: Path, writer: _Writer | None, client_state: bytes) -> Path:
    entries: dict[str, Entry] = {}
    for unit in engine.units:
        flats = engine.parts.states.read(unit.layout)
        file = f"unit-{unit.index:05d}.safetensors"
        dtype = str(unit.layout.dtype).removeprefix("torch.")
        for slot, step in zip(unit.layout.slots, unit.steps, strict=True):
            entries[slot.name] = Entry(slot.shape, dtype, unit.layout.trainable, file, step)
        if writer is not None:
            kinds = engine.parts.states.kinds(unit.layout)
            writer.write_unit(file, unit, {kind: flats[kind.name] for kind in kinds})
        del flats
    generators = rng.pack_states(engine.ranks, engine.device)
    if writer is not None:
        writer.write(BUFFERS, _host(persistent_buffers(engine.module)))
        writer.write_raw(CLIENT_STATE, client_state)
        writer.write_raw(rng.FILE, generators)
        writer.finish(_index(engine, entries, writer.files))
    failed = engine.ranks.sum(1.0 if writer is not None and writer.error is not None else 0.0)
    if writer is not None and writer.error is not None:
        raise CheckpointError(f"the checkpoint {target} could not be written: {writer.error}") from writer.error
    if failed:
        raise CheckpointError(f"the checkpoint {target} could not be written: see the error of rank 0")
    return target


def _pack(client_state: dict[str, Any]) -> bytes:
    """What `load` will read back, tried now: a checkpoint that cannot be loaded must not replace one that can."""
    packed = io.BytesIO()
    try:
        torch.save(client_state, packed)
        torch.load(io.BytesIO(packed.getvalue()), weights_only=True)
    except Exception as error:  # noqa: BLE001 - pickling runs any class's code
        raise CheckpointError(
            "client_state cannot be saved so that it loads safely: it may hold tensors, numbers, strings, and lists, "
            f"tuples and dicts of them ({str(error).splitlines()[0]})"
        ) from None
    return packed.getvalue()


def _host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _index(engine: Engine, entries: dict[str, Entry], files: dict[str, FileRecord]) -> Index:
    groups = [{name: value for name, value in g.items() if name != "params"} for g in engine.optimizer.param_groups]
    schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    if schedule is not None:
        schedule = {name: value for name, value in schedule.items() if name != "lr_lambdas"}
    return Index(
        global_steps=engine.global_steps,
        parameters=entries,
        file_bytes={name: file.nbytes for name, file in files.items()},
        file_crc32={name: file.crc32 for name, file in files.items()},
        optimizer=engine.config.optimizer.type,
        param_groups=groups,
        lr_scheduler=schedule,
        moments=engine.config.infinity.moments,
        skipped_steps=engine.skipped_steps,
        loss_scale=engine.loss_scale.state_dict() if engine.config.fp16.enabled else None,
    )


class _Writer:
    """Rank 0's side. Remembers its first error instead of raising it, so that all ranks stay in step."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.error: Exception | None = None
        self.files: dict[str, FileRecord] = {}
        self._target = directory / tag
        self._partial = directory / f".{tag}.partial-{os.getpid()}"
        self._replaced = directory / f".{tag}.replaced-{os.getpid()}"
        _remove_stale(directory)
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            self.error = error

    def write_unit(self, file: str, unit: Unit, flats: Mapping[StateKind, torch.Tensor]) -> None:
        tensors = {
            key(kind.name, slot.name): view(kind, slot, flat)
            for kind, flat in flats.items()
            for slot in unit.layout.slots
        }
        self.write(file, tensors)

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        specs = {name: Spec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        self._keep(file, lambda path: write_tensors(path, specs, lambda name: [tensors[name]]))

    def write_raw(self, file: str, content: bytes) -> None:
        self._keep(file, lambda path: write_bytes(path, content))

    def _keep(self, file: str, write: Callable[[Path], FileRecord]) -> None:
        if self.error is not None:
            return
        try:
            self.files[file] = write(self._partial / file)
        except Exception as error:  # noqa: BLE001 - raised on all ranks by `save`
            self._fail(error)

    def remove(self) -> None:
        """Leave nothing of a checkpoint that is not whole."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def finish(self, index: Index) -> None:
        """Put the whole checkpoint in its place, then let `latest` name it."""
        if self.error is not None:
            return
        try:
            write_bytes(self._partial / INDEX, index.to_json().encode())
            self._put_in_place()
            latest = self._target.parent / f".{LATEST}-{os.getpid()}"
            latest.write_text(self._target.name, encoding="utf-8")
            _sync(latest)
            os.replace(latest, self._target.parent / LATEST)
            _sync(self._target.parent)
        except Exception as error:  # noqa: BLE001 - raised on all ranks by `save`
            self._fail(error)

    def _put_in_place(self) -> None:
        """Two renames where the tag was saved before; `find` knows the former one by its name in between."""
        if self._target.exists():
            os.rename(self._target, self._replaced)
        try:
            os.rename(self._partial, self._target)
        except BaseException:
            if self._replaced.exists():
                os.rename(self._replaced, self._target)
            raise
        _sync(self._target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.remove()


def _remove_stale(directory: Path) -> None:
    """Take away what saves left that were killed: partial folders, and replaced ones whose successor is in place."""
    for kind in ("partial", "replaced"):
        for folder in directory.glob(f".*.{kind}-*"):
            tag, _, pid = folder.name[1:].rpartition(f".{kind}-")
            whole = kind == "partial" or (directory / tag).exists()
            if whole and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

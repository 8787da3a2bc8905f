"""Loads the last commit of a durable run into any engine of the same model.

Units, tiers, tile size, number of ranks and formats may differ. Parameters are read one by one, from the slots of all
ranks that hold a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.agree import folder_of, run_of
from infinity.checkpoint.format import Entry, Index, own_states
from infinity.checkpoint.rank_states import RankStates, Shards, well_formed
from infinity.checkpoint.saved import CheckpointFolder, PieceOf, SavedStates
from infinity.comm.communicator import Communicator
from infinity.durable import folder as files
from infinity.durable.choose import Source, check_jobs, check_layout, last_source
from infinity.durable.manifest import Manifest, read_manifest
from infinity.durable.record import BUFFERS, CHECKSUMS, CLIENT_STATE, RNG, Record, read_record
from infinity.durable.run import DurableRun
from infinity.errors import CheckpointError, StorageError
from infinity.nn.pieces import Piece
from infinity.plan.formats import StateKind
from infinity.tiers.open_tiers import states_in
from infinity.units.states import Flats
from infinity.units.unit import Unit

T = TypeVar("T")


class CommittedStates:
    """The states of a commit. Each tile of a tensor is a parameter of its own.

    Client state, buffers and RNG states are this rank's if the number of ranks is that of the commit. Otherwise client
    state and buffers are rank 0's.
    """

    def __init__(self, path: Path, folders: Sequence[Path], number: int, rank: int, ranks: int) -> None:
        """path: of the run. folders: of the generation, in each folder of nvme_path. number: of the commit. rank: of
        this process, of `ranks`. Raises CheckpointError if a file of a rank is missing, cut short, or not of the
        commit.
        """
        self.path = path
        with well_formed(path):
            self._manifest = manifest_in(folders[0], 0)
            self._is_same = self._manifest.ranks == ranks
            layout = self._manifest.layout
            if layout["model_parallel"] != 1:
                raise CheckpointError(
                    f"{self.path} was written by {layout['model_parallel']} tensor-parallel ranks: resume with the "
                    "number of ranks and the settings that wrote it, and save a checkpoint to change them"
                )
            records = {writer: _record(folders[0], writer, number) for writer in range(layout["shards"])}
            check_jobs({record.proof.job for record in records.values()}, self.path)
            shards = [states_of(folders, n, manifest_in(folders[0], n), record) for n, record in records.items()]
            self._shards = Shards(shards)
            first = records[0]
            if any((each.progress, each.unit_steps) != (first.progress, first.unit_steps) for each in records.values()):
                raise CheckpointError(
                    f"{folders[0]} has files of different runs, since ranks differ in their units or steps: copy the "
                    "files of one run to it"
                )
            own = rank if self._is_same else 0
            self._record = records.get(own) or _record(folders[0], own, number)
            self.index = self._index()

    def pieces(self, units: Iterable[Unit], model: nn.Module) -> PieceOf:
        return {slot.name: Piece(slot.name, slot.shape) for unit in units for slot in unit.layout.slots}

    def check(self, ranks: Communicator, *, verify: bool) -> None:
        """Raise CheckpointError if the model is tensor-parallel. verify: also read the states and compare them with
        their records; each rank takes some files.
        """
        if ranks.model.size != 1:
            raise CheckpointError(
                f"{self.path} was written without tensor parallelism, and this engine has {ranks.model.size} "
                "tensor-parallel ranks: resume without tensor parallelism, and save a checkpoint to change that"
            )
        if verify:

            def compare() -> None:
                for states in self._shards.ranks[ranks.rank :: ranks.size]:
                    states.verify()

            together(ranks, compare)

    def read(self, piece: Piece, kinds: Sequence[StateKind]) -> Flats:
        slot = self._shards.slots[piece.name][1]
        return {kind.name: self._shards.read(piece.name, kind).view(kind.shape_in(slot.shape)) for kind in kinds}

    def read_range(self, piece: Piece, kinds: Sequence[StateKind], start: int, stop: int) -> Flats:
        return {kind.name: self._shards.read(piece.name, kind, start, stop) for kind in kinds}

    def buffers(self) -> dict[str, torch.Tensor]:
        try:
            return load_tensors(self._record.blobs[BUFFERS])
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"the buffers of {self.path} cannot be read ({error}): load a checkpoint") from None

    def client_state(self) -> dict[str, Any]:
        return rng.unpack(self._record.blobs[CLIENT_STATE], self.path)

    def generators(self, ranks: Communicator) -> dict[str, Any] | None:
        if self._is_same:
            return rng.unpack_states(self._record.blobs[RNG], self.path)
        rng.note_unrestored(self._manifest.ranks, ranks)
        return None

    def _index(self) -> Index:
        layout = self._manifest.layout
        parameters: dict[str, Entry] = {}
        for unit, steps in zip(self._shards.ranks[0].units, self._record.unit_steps, strict=True):
            dtype, trainable = unit.layout.dtype, unit.layout.trainable
            for slot, step in zip(unit.layout.slots, steps, strict=True):
                name = str(dtype).removeprefix("torch.")
                states = None if slot.record is None else own_states(slot.record.kinds(step))
                parameters[slot.name] = Entry(slot.shape, name, trainable, "", step, slot.group, states)
        return Index(
            parameters=parameters,
            file_bytes={},
            optimizer=layout["optimizer"],
            moments=layout["moments"],
            rule=layout["rule"] if any(entry.states is not None for entry in parameters.values()) else "",
            **vars(self._record.progress),
        )


@contextmanager
def open_saved(
    ranks: Communicator, directory: str | Path, tag: str | None, run: DurableRun | None = None
) -> Iterator[SavedStates]:
    """Open the checkpoint directory/tag, or the last commit of the run in `directory`. Collective.

    run: the run that this process holds. A different one is locked until the end of the block. Raises RanksError if the
    ranks name different ones, CheckpointError for what is missing or damaged and for a tag in the folder of a run, and
    StorageError if the run is in use.
    """
    if not _is_run(ranks, directory):
        yield CheckpointFolder(folder_of(ranks, directory, tag))
        return
    path = run_of(ranks, directory)
    check_no_tag(ranks, path, tag)
    with ExitStack() as stack:
        source: Source | None = None
        if run is not None and run.holds(path):
            runs, source = run.runs, run.source
        else:
            runs = [path]
            together(ranks, lambda: stack.enter_context(files.unchanged(path)))
            source = last_source(ranks, path)
        if source is None:
            raise CheckpointError(f"{path} has no committed step: start the run without loading it")
        generation, number = source.generation, source.number
        folders = [files.generation_folder(each, generation) for each in runs]
        rank, size = ranks.model.number * ranks.size + ranks.rank, ranks.size * ranks.model.size
        yield together(ranks, lambda: CommittedStates(path, folders, number, rank, size))


def check_no_tag(ranks: Communicator, run: Path, tag: str | None) -> None:
    """Raise CheckpointError if a rank asks for a checkpoint `tag` in the folder of a run. Collective."""
    tags = sorted({each for each in ranks.gather(tag) if each is not None})
    if tags:
        raise CheckpointError(
            f"{run} is the folder of a durable run, which has its last commit and no checkpoint {tags[0]!r}: leave out "
            "the tag to load the commit, or pass the directory of the checkpoint"
        )


def check_no_run(ranks: Communicator, directory: str | Path) -> None:
    """Raise CheckpointError if `directory`, of checkpoints to write, is the folder of a run. Collective."""
    if _is_run(ranks, directory):
        raise CheckpointError(
            f"{directory} is the folder of a durable run, which load_checkpoint() takes for its last commit: save "
            "checkpoints to another directory"
        )


def _is_run(ranks: Communicator, directory: str | Path) -> bool:
    return any(ranks.gather(files.is_run(Path(directory))))


def manifest_in(folder: Path, rank: int) -> Manifest:
    path = files.manifest_file(folder, rank)
    manifest = read_manifest(path)
    if manifest is None:
        raise CheckpointError(
            f"{path} is missing or damaged: the files of all ranks are needed, also those on the drives of other "
            "machines. Copy them to this folder, or resume with the number of ranks and the settings that wrote them"
        )
    return manifest


def _record(folder: Path, rank: int, number: int) -> Record:
    path = files.record_file(folder, rank, number)
    record = read_record(path)
    if record is None or record.number != number:
        raise CheckpointError(
            f"{path} is missing or damaged, so commit {number} cannot be read: restore the files of all ranks, or load "
            "a checkpoint"
        )
    return record


def states_of(folders: Sequence[Path], rank: int, manifest: Manifest, record: Record) -> RankStates:
    """Return a rank's states of a commit. folders: of the generation, in each folder of nvme_path. Raises
    CheckpointError if the record is of another manifest, or as `RankStates`.
    """
    check_layout(record, manifest, folders[0])
    checksums = record.blobs.get(CHECKSUMS, b"")
    return RankStates(states_in(folders, rank), manifest.layout, record.slots, checksums, record.digests)


def together(ranks: Communicator, work: Callable[[], T]) -> T:
    """Return `work()`. Collective; if it fails on one rank, all ranks raise."""
    error: CheckpointError | StorageError | None = None
    try:
        done = work()
    except (CheckpointError, StorageError) as caught:
        error = caught
    texts = [text for text in ranks.gather(str(error or "")) if text]
    if error is not None:
        raise error
    if texts:
        raise CheckpointError(texts[0])
    return done

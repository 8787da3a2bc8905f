"""Durable steps of a training engine: commits each step, and resumes from the last commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors, save as save_tensors
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.committed import Committed
from infinity.checkpoint.format import Progress, buffers_in_memory
from infinity.checkpoint.load import match_buffers
from infinity.checkpoint.save import pack_client_state
from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.durable.commits import Commits, Step
from infinity.durable.folder import manifest_file
from infinity.durable.manifest import read_manifest
from infinity.durable.record import BUFFERS, CLIENT_STATE, RNG, Record
from infinity.durable.run import DurableRun
from infinity.durable.source import manifest_in, states_of, together
from infinity.engine.training_runner import TrainingRunner
from infinity.errors import CheckpointError, StorageError, UsageError
from infinity.interrupts import on_sigterm
from infinity.plan.plan import Plan
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableTier
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Transfer


class DurableSteps:
    """Commits of one engine. Methods are called by the model's thread, between two steps."""

    def __init__(
        self,
        run: DurableRun,
        plan: Plan,
        tiers: Mapping[TierKind, Tier],
        runner: TrainingRunner,
        ranks: Communicator,
        device: Device,
        refused: Collection[str],
    ) -> None:
        """run: the held folder. refused: units whose update was skipped, which stops the commits."""
        assert plan.io is not None and plan.io.durable is not None
        tier = tiers[TierKind.NVME]
        assert isinstance(tier, DurableTier)
        self.run = run
        self._tier = tier
        self._extents = plan.io.durable.extents
        self._memory = {name: tier for name, tier in tiers.items() if isinstance(tier, SlabTier)}
        self._runner, self._store = runner, runner.store
        runner.edits.commit_steps()
        self._device = device
        self._commits = Commits(
            run, tier, self._memory, self._extents, SideChannel(ranks), device, lambda: bool(refused)
        )
        self._generations = [0] * len(runner.store.units)
        """That of each unit at the last commit; another number means that an update was started since."""
        self._kept: list[Callable[[int], Transfer]] = []
        """Unit → transfer that copies its committed slots, which updates write after the next commit."""
        self._has_begun = False
        self._misplaced = ""
        """`Commits.misplaced` of the last commit that was waited for."""
        self._stops = False
        """True if a commit that this step waited for agreed to stop, so that all ranks see the same."""
        self._restore_handler = on_sigterm(self._commits.ask_to_stop)

    # -- commit ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start the updates of the step before, so that it can be committed, and raise if the run was not loaded."""
        self.run.check_loaded()
        self._runner.start_due_updates()
        self._has_begun = True

    def check_begun(self) -> None:
        """Raise UsageError if the step would not be committed."""
        if not self._has_begun:
            raise UsageError(
                "optimizer.step() was called in a durable run (infinity.durable), whose steps engine.step() commits: "
                "call engine.step() instead"
            )

    def commit(self, progress: Progress, model: nn.Module, client_state: dict[str, Any]) -> None:
        """Commit the step that has ended, once its updates have. Waits for the commit before it.

        Raises CheckpointError if `client_state` cannot be read back, and StorageError if the last commit failed.
        """
        self._has_begun = False
        blobs: dict[str, bytes] = {CLIENT_STATE: pack_client_state(client_state)}
        with self._device.recorder.wait("gather", "saves"):
            self._commits.wait()
        self._stops, self._misplaced = self._commits.stops, self._commits.misplaced
        self._runner.edits.write()
        units = self._store.units
        with self._device.recorder.wait("compute", "saves"):
            buffers = buffers_in_memory(model)
        generators = rng.own_states(self._device.torch_device)
        step = Step(
            updates=[each for unit in units if (each := unit.present_update()) is not None],
            updated={u.index for u in units if u.due_update is not None or u.generation != self._generations[u.index]},
            written={name: tier.take_written() for name, tier in self._memory.items()},
            progress=progress,
            unit_steps=[unit.steps for unit in units],
            blobs=lambda: {**blobs, RNG: rng.pack(generators), BUFFERS: save_tensors(buffers)},
        )
        self._generations = [unit.generation for unit in units]
        committing = self._commits.start(step)
        for unit in units:
            for keep in self._kept:
                unit.write_after(keep(unit.index))
            unit.write_after(committing)
        self._kept.clear()

    @property
    def must_stop(self) -> bool:
        """True if a rank was asked to stop by SIGTERM before the last commit but one, or, alone, before now.

        The last commit may be under way, and done on some ranks only, so its answer is that of the next step.
        """
        return self._stops or (self._commits.asked_to_stop and self._commits.is_single)

    def wait(self) -> None:
        """Wait until the last step is committed. Its updates must have begun."""
        self._commits.wait()

    def check_kept(self) -> None:
        """Raise StorageError on all ranks if the commit that the last `commit` waited for was left out, since files of
        the run are not in their places. The states are those of the step, and can be saved.
        """
        if self._misplaced:
            raise StorageError(self._misplaced)

    def finish(self) -> None:
        """Wait until the last step is committed. Raises StorageError if it is not."""
        self._commits.wait()
        self._misplaced = self._commits.misplaced
        self.check_kept()

    # -- save --------------------------------------------------------------------------------------------------------

    def committed(self, progress: Progress) -> Committed | None:
        """Return the last commit, if it is complete and its states are the present ones. They must be in their tiers.

        None also if it failed, or if its files are gone: the states can then be saved from their tiers.
        """
        try:
            self._commits.wait()
            return self._unchanged(progress)
        except (StorageError, CheckpointError):
            return None

    def _unchanged(self, progress: Progress) -> Committed | None:
        record, run = self.run.record, self.run
        if record is None or not run.is_loaded or not self._commits.are_present:
            return None
        steps = [list(unit.steps) for unit in self._store.units]
        if (record.progress.global_steps, record.unit_steps) != (progress.global_steps, steps):
            return None
        manifest = read_manifest(manifest_file(run.folders[0], run.rank))
        if manifest is None or manifest.layout["model_parallel"] != 1:
            return None
        return Committed(states_of(run.folders, run.rank, manifest, record), run.rank, self._kept.append)

    # -- load --------------------------------------------------------------------------------------------------------

    def verify(self, ranks: Communicator) -> None:
        """Read this rank's committed states and compare them with their record. Collective. Raises CheckpointError."""
        run, record = self.run, self.run.record
        assert record is not None

        def compare() -> None:
            manifest = manifest_in(run.folders[0], run.rank)
            states_of(run.folders, run.rank, manifest, record).verify()

        together(ranks, compare)

    def can_adopt(self, folder: Path) -> bool:
        """Return whether the files of this run in `folder` hold a commit in the present layout."""
        return self.run.holds(folder) and self.run.record is not None

    def commit_loaded(self, source: Path, progress: Progress, model: nn.Module, client_state: dict[str, Any]) -> None:
        """Commit states that were loaded from `source`, and wait.

        No-op if they would replace a commit of this run that was not loaded, which the next step refuses.
        """
        if self.run.holds(source):
            self.run.note_loaded()
        if self.run.may_commit:
            self.commit(progress, model, client_state)
            self.wait()

    def adopt(self, model: nn.Module) -> Record:
        """Make the states of the last commit the present ones, and return its record. All units must be released.

        Raises CheckpointError if the model's buffers differ.
        """
        record = self.run.record
        assert record is not None
        buffers = match_buffers(model, load_tensors(record.blobs[BUFFERS]), self.run.path)
        self._tier.adopt(record.slots, [each.first for each in self._extents])
        reading = [
            self._tier.read(each.first, self._memory[each.working.tier].memory(each.working))
            for each in self._extents
            if each.working.tier in self._memory
        ]
        for transfer in reading:
            transfer.wait()
        for tier in self._memory.values():
            tier.take_written()
        self._commits.note_writes()
        for unit, steps in zip(self._store.units, record.unit_steps, strict=True):
            unit.restore_steps(steps)
            unit.forget_saves()
            unit.rewritten()
        for buffer, value in buffers:
            buffer.copy_(value)
        self._runner.refresh_viewed()
        return record

    def closers(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return functions that end the commits, and that unlock the folder. They hold no reference to the model."""
        restore, commits, run = self._restore_handler, self._commits, self.run

        def end() -> None:
            restore()
            commits.close()

        return end, run.close

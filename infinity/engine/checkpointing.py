"""Checkpoints of a training engine: saves and loads, and the progress of a run in them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.checkpoint import rng
from infinity.checkpoint.background import Saving
from infinity.checkpoint.format import Index, Progress
from infinity.checkpoint.load import Loading
from infinity.checkpoint.save import save
from infinity.checkpoint.snapshot import Run
from infinity.comm.agreement.announcements import Operation
from infinity.durable.record import CLIENT_STATE, RNG
from infinity.durable.source import check_no_run, check_no_tag, open_saved
from infinity.engine.base import BaseEngine
from infinity.engine.durable import DurableSteps
from infinity.engine.optimizer.loss_scale import LossScale
from infinity.engine.optimizer.state_dict import from_plain, to_plain
from infinity.engine.optimizer.unit_optimizer import UnitOptimizer
from infinity.engine.parts import UpdateParts
from infinity.engine.schedules.client import RateScheduler
from infinity.engine.weights_file import save_weights


class CheckpointingEngine(BaseEngine):
    """Saves and loads the states of an engine that trains.

    Subclasses set `updates`, `optimizer`, `lr_scheduler` and `loss_scale`.
    """

    updates: UpdateParts
    optimizer: UnitOptimizer
    lr_scheduler: RateScheduler | None
    loss_scale: LossScale

    @abstractmethod
    def _settle(self) -> None:
        """Execute pending updates and wait until every state is in its tier, without checks."""

    @abstractmethod
    def _abandon_step(self) -> None:
        """Drop the step's gradients, even if units were updated with them; the caller must then replace all states or
        stop the engine.
        """

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        background: bool = False,
    ) -> Path:
        """Write a checkpoint to directory/tag, unit by unit, and return its folder.

        tag: by default `global_step` and the number of steps, such as "global_step300".
        The file `latest` is updated once the checkpoint is complete, unless `save_latest` is False. Collective; call it
        between two steps. exclude_frozen_parameters: leave out parameters that do not require gradients, as of a base
        model under adapters; load such a checkpoint with `load_module_strict=False`.

        background: return at once, and write the present states while training continues. Updates of a unit wait until
        its states have been read. `engine.saving` reports completion; the next save, a load and `close` wait for it.
        If it fails, CheckpointError is raised once, by `engine.saving.wait()` or the next `step`, `save_checkpoint` or
        `close`. Training may continue then.

        In a durable run (infinity.durable), waits for the commit of the last step. Its files are then copied inside the
        kernel instead of reading states from their tiers, unless states have changed since; see docs/durable.md.
        """
        self._check_between_steps("a checkpoint")
        self.begin_together(Operation.SAVE_CHECKPOINT)
        self._finish_saving()
        self.settle()
        check_no_run(self.ranks, directory)
        run, state, durable = Run(self.config, self._progress()), client_state or {}, self.updates.durable
        return save(
            self.parts,
            self.updates.saver,
            self.module,
            run,
            directory,
            tag,
            state,
            background=background,
            latest=save_latest,
            leaves_out=self.left_out(exclude_frozen_parameters),
            committed=None if durable is None else durable.committed(run.progress),
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's state_dict, unsharded, to one file in `save_dir`, and return True. Collective.

        Values have the dtype that the model computes in. A name that ends in `.safetensors` selects that format, in
        which a shared parameter has its first name only; others are written by `torch.save`. Rank 0 needs host memory
        for the whole model; `infinity export` writes a checkpoint's weights part by part instead.
        """
        return save_weights(self, save_dir, save_filename, exclude_frozen_parameters)

    @property
    def saving(self) -> Saving | None:
        """The last save started with `background=True`, or None. Its `wait()` is collective."""
        return self.updates.saver.last

    def _finish_saving(self) -> None:
        """Wait on all ranks for a checkpoint being written in the background. Raises CheckpointError if it failed."""
        unsaved = self.updates.saver.failure(self.ranks)
        if unsaved is not None:
            raise unsaved

    def load_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        verify: bool = True,
        load_rng: bool = True,
    ) -> tuple[Path, dict[str, Any]]:
        """Load directory/tag (default: the checkpoint named by `latest`), saved with any ranks, tiers or units.

        Returns the checkpoint's path and its client_state. verify: first read all files once to compare their
        checksums. load_rng: also restore the RNG states of torch, Python and numpy, if the number of ranks is the same.

        load_module_strict: False: ignore parameters that only the model or only the checkpoint has.
        load_optimizer_states: False: keep the present moments, hyper-parameters and loss scale.
        load_lr_scheduler_states: False: keep the present state of the scheduler. load_module_only: load only values of
        parameters and buffers, which begins a new run. Values are those of the fp32 masters.

        The folder of a durable run (infinity.durable) loads its last commit, also in an engine of another run, and has
        no tags. The loaded states are the first commit of a durable engine, which removes those that another number
        of ranks or other units wrote to its own folder. See `resume`.

        Raises CheckpointError, before any change, if the checkpoint is missing, damaged or of another model.
        """
        self.updates.saver.join()
        self.begin_together(Operation.LOAD_CHECKPOINT)
        self._conclude_backward()
        self._settle()
        optimizer = load_optimizer_states and not load_module_only
        durable = self.updates.durable
        if durable is not None:
            durable.wait()
            if optimizer and durable.can_adopt(Path(directory)):
                check_no_tag(self.ranks, Path(directory), tag)
                if verify:
                    durable.verify(self.ranks)
                return Path(directory), self._adopt(durable, scheduler=load_lr_scheduler_states, load_rng=load_rng)
        with open_saved(self.ranks, directory, tag, None if durable is None else durable.run) as saved:
            loading = Loading(
                self.parts,
                self.module,
                Run(self.config, self._progress()),
                saved,
                verify=verify,
                load_rng=load_rng and not load_module_only,
                optimizer=optimizer,
                strict=load_module_strict,
            )
            self._abandon_step()
            with self._replacing(saved.path):
                loading.apply()
                if not load_module_only:
                    self._restore(loading.index, optimizer=optimizer, scheduler=load_lr_scheduler_states)
                loading.restore_rng()
        if durable is not None:
            with self.failing():
                durable.commit_loaded(saved.path, self._progress(), self.module, loading.client_state)
        return saved.path, loading.client_state

    def resume(self, *, verify: bool = True, load_rng: bool = True) -> dict[str, Any] | None:
        """Go on from the last committed step of this engine's durable run, and return its client_state.

        Returns None if nothing is committed, or without infinity.durable. Collective; call it before the first step.
        The number of ranks, units, tiers, tile size and formats may differ from those of the step: the states are
        converted and committed again. verify: first read the states once and compare them with the digests of their
        commit, so that a copy that was made while the run trained is refused with a CheckpointError. load_rng: also
        restore the RNG states of torch, Python and numpy, if the number of ranks is the same.
        """
        self._check_open()
        durable = self.updates.durable
        if durable is None or durable.run.source is None:
            return None
        return self.load_checkpoint(durable.run.path, verify=verify, load_rng=load_rng)[1]

    def _adopt(self, durable: DurableSteps, *, scheduler: bool, load_rng: bool) -> dict[str, Any]:
        """Go on from the last commit in its own slots. Returns its client_state."""
        self._abandon_step()
        with self.failing():
            record = durable.adopt(self.module)
        self._restore(record.progress, optimizer=True, scheduler=scheduler)
        if load_rng:
            states = rng.unpack_states(record.blobs[RNG], durable.run.path)
            rng.restore_states(states, self.parts.device.torch_device)
        durable.run.note_loaded()
        return rng.unpack(record.blobs[CLIENT_STATE], durable.run.path)

    def _progress(self) -> Progress:
        """Raises CheckpointError for a hyper-parameter or a state of the scheduler that cannot be saved."""
        scheduler = self.lr_scheduler
        groups = [{key: v for key, v in group.items() if key != "params"} for group in self.optimizer.param_groups]
        schedule = None if scheduler is None else {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
        return replace(
            super()._progress(),
            param_groups=to_plain(groups, "param_groups"),
            lr_scheduler=to_plain(schedule, "lr_scheduler"),
            loss_scale=self.loss_scale.state_dict() if self.config.scales_loss else None,
        )

    def _restore(self, index: Index | Progress, *, optimizer: bool, scheduler: bool) -> None:
        """Restore step counts from a checkpoint's index, or from a commit.

        optimizer: also hyper-parameters and loss scale. scheduler: also the schedule.
        """
        self.global_steps, self.skipped_steps = index.global_steps, index.skipped_steps
        if scheduler and self.lr_scheduler is not None and index.lr_scheduler is not None:
            present = self.lr_scheduler.state_dict()
            self.lr_scheduler.load_state_dict({**present, **from_plain(index.lr_scheduler, present)})
        if not optimizer:
            return
        for group, saved_group in zip(self.optimizer.param_groups, index.param_groups, strict=False):
            group.update(from_plain(saved_group, {**group, "betas": ()}))
        if index.loss_scale is not None:
            self.loss_scale.load_state_dict(index.loss_scale)

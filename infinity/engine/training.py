"""The training engine: an ordinary module and loop, with states on device, host and nvme."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from infinity.comm.agreement.announcements import Operation
from infinity.comm.groups import Group
from infinity.engine.checkpointing import CheckpointingEngine
from infinity.engine.loss_check import FirstBatches, LossCheck, LossReader, check_scalar, warn_of_sums
from infinity.engine.optimizer.loss_scale import GradNorm, LossScale
from infinity.engine.optimizer.tier_states import TierStates
from infinity.engine.optimizer.unit_optimizer import (
    ParamGroups,
    UnitOptimizer,
    param_groups,
    present_groups,
    refuse_managed,
)
from infinity.engine.platform import MACHINE, Platform
from infinity.engine.reports import StepReports, monitor_of
from infinity.engine.restore import offload, reload
from infinity.engine.schedules.client import RateScheduler, make_scheduler, step_arguments
from infinity.engine.vertical.batches import BatchTrainer, Together
from infinity.engine.vertical.checks import LossFunction, blocks_of, draw
from infinity.engine.wiring import assemble, plan_model
from infinity.errors import LifetimeError, NonFiniteError, OutOfSpaceError, UsageError
from infinity.interrupts import uninterrupted
from infinity.model import bitsandbytes
from infinity.model.added import Additions
from infinity.observe.clock import Phase
from infinity.observe.log import StepLog, logger
from infinity.optim.parameter_rule import ParameterHyper, ParameterRule
from infinity.plan.policy import Sharding, compute_dtype
from infinity.rules import Hyper
from infinity.schedule.step import Call, after_a_failed_backward, changed_during_update, unscaled_loss
from infinity.tiers.accelerator import default_device
from infinity.tiers.device import Device
from infinity.units.compiled import eager, has_backward_hooks, own_name, refuse_compiled_autograd, uncompiled

if TYPE_CHECKING:
    from infinity.config import Config


class TrainingEngine(CheckpointingEngine):
    """Trains `model` according to `config`. Constructed by `infinity.initialize`; call it like the model.

    `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`. With accumulation, call all three for each
    micro-batch: `step` updates after the last one.
    """

    _maker = "infinity.initialize()"
    _remedy = "make a new one and load the last checkpoint"

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        model_parameters: ParamGroups | None = None,
        *,
        device: Device | None = None,
        process_group: Group | None = None,
        platform: Platform = MACHINE,
        rules: Sequence[ParameterRule | None] = (),
    ) -> None:
        """rules: the rule in Python of each group of `model_parameters`; None: the config's."""
        seam = device or default_device()
        called, model = model, uncompiled(model)
        self.loss_scale = LossScale.of(config)
        """The loss scale of fp16; `loss_scale.value` is 1 in other dtypes."""
        sharded = Sharding.of(config.zero_optimization.stage).optim
        timeout = config.infinity.rank_timeout
        ranks = platform.communicator(seam, sharded=sharded, group=process_group, rank_timeout=timeout)
        with ranks.construction(), ExitStack() as undo:
            self.batch = config.resolve_batch(ranks.size)
            """Batch sizes: `micro` samples per forward, `accumulation` forwards per step, `train` samples per step."""
            groups = param_groups(model, model_parameters)
            names = {own_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
            undo.callback(bitsandbytes.restore, model)
            bitsandbytes.prepare(model, seam.torch_device)
            planned = plan_model(model, config, groups, seam, ranks, rules, platform=platform)
            parts = assemble(model, planned, config, seam, ranks, self, platform)
            undo.callback(parts.closer())
            self.optimizer = UnitOptimizer(
                present_groups(groups, names, parts.units),
                config.optimizer.hyper(),
                self,
                TierStates(parts, config, rules),
                self.loss_scale,
                rules,
            )
            """The optimizer: its `param_groups` hold the learning rates, and its states are in their tiers."""
            self.lr_scheduler: RateScheduler | None = make_scheduler(
                self.optimizer, config.scheduler, config.optimizer.params.lr
            )
            """The learning-rate scheduler of the config, which `step` advances, or None."""
            self.monitor = monitor_of(config, main=ranks.is_main_rank)
            """Writers of the config's monitors. `monitor.write_events([(tag, value, samples)])` adds events."""
            undo.callback(self.monitor.close)
            ranks.barrier()  # raises on all ranks if construction failed on one
            undo.pop_all()
        self.global_steps = 0
        """Number of optimizer steps, including those of the run that a loaded checkpoint continues."""
        self.skipped_steps = 0
        """Number of steps, included in `global_steps`, that were skipped because their gradients overflowed (fp16)."""
        self._grad_norm = GradNorm()
        self._first_batches = FirstBatches(ranks)
        self._warns_of_sums = ranks.is_main_rank and self.batch.accumulation > 1
        self._loss_reader = None if seam.host_addressable else LossReader(seam)
        assert parts.training is not None
        self.updates = parts.training
        """Gradients, updates and saves. Internal."""
        self._step = parts.schedule.step
        super().__init__(called, config, parts, compute_dtype(config))
        self._watches = [*self.updates.runner.watch(), register_optimizer_step_pre_hook(refuse_managed)]
        self._additions = Additions(model)
        self._log = StepLog(self.ledger, seam.recorder, config.steps_per_print if ranks.is_main_rank else 0)
        self._reports = StepReports(config, self.monitor, self.ledger, seam, main=ranks.is_main_rank)
        self._called = self._reports.around(called, self.module, lambda: self.global_steps)
        self._batches = BatchTrainer(self, Together(self._forwards_together, self._losses_together, self.failing))

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches of the present step whose gradients have been collected."""
        return self._step.micro_steps

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's whole gradient before clipping. None before the first step, after a skipped one, and
        on several ranks with neither clipping nor infinity.check_nan, since ranks do not exchange norms then.
        """
        return self._grad_norm.read()

    # -- the loop ----------------------------------------------------------------------------------------------------

    @eager
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward on `loss` (a scalar) divided by gradient_accumulation_steps, so that a step's gradient is the
        mean over its micro-batches, and return that quotient. A plain `loss.backward()` sums over them, as in PyTorch;
        see `scale`.

        retain_graph: as in `Tensor.backward`. scale_wrt_gas: False: do not divide, for a loss that is divided already.

        Raises NonFiniteError on all ranks, without a change of any state, if the loss is NaN or infinite. On an
        accelerator its backward has then run, and its gradients are dropped. In fp16 such a loss counts as an overflow,
        and the step is skipped.
        """
        self._check_open()
        refuse_compiled_autograd()
        self._conclude_backward()
        check_scalar(loss)
        self._step.check(Call.BACKWARD)
        self._reports.begin(Phase.BACKWARD)
        accumulation = self.batch.accumulation if scale_wrt_gas else 1
        with self._checked(loss), self.failing():
            self._scaled(loss, accumulation).backward(retain_graph=retain_graph)
        self._reports.add_loss(loss, accumulation)
        self._reports.end(Phase.BACKWARD)
        return loss if accumulation == 1 else loss / accumulation

    def train_batch(
        self,
        batches: Iterator[Any],
        loss_fn: LossFunction | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        client_state: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Run a whole step on the next gradient_accumulation_steps micro-batches of `batches`, and return the mean of
        their losses. The result is bit-identical to `backward` and `step` for each of them.

        A mapping is passed to the model as keyword arguments, a tuple or list as positional ones, and anything else as
        the only one. The loss is the output itself, its `loss`, or the first entry of a tuple; loss_fn: returns it from
        the output and the micro-batch. client_state: as of `step`.

        blocks: modules of the model, such as `model.layers`, which all micro-batches pass together, one block after the
        other. So each block's parameters are fetched twice a step, for forward and for backward, instead of twice a
        micro-batch. The graphs of all micro-batches are then in memory, or in the tier of infinity.activations.
        Without blocks, micro-batches run one after the other. With them, the caller promises:

        - Each forward calls each block once, in this order. Each takes what the one before returned, or code in between
          made of it, and nothing else that requires a gradient.
        - Micro-batches share nothing but parameters. Their forwards run in turns, so a forward may find what another
          one left: none reads, after a block, what it kept on the model or in a global before, such as an auxiliary
          loss that blocks set and the model sums, or leaves a global setting changed while its blocks run.
        - The model draws no random numbers.

        A violation that the engine detects raises ModelError, in the first such step before any update. infinity.debug
        runs that step in both orders, and compares losses, gradients and buffers. A compiled model, tensor parallelism,
        hooks of modules or parameters, and a context of the calling thread, such as autocast, raise UsageError. On
        several ranks the others raise RanksError, and the engine stops. A step runs as a loop where blocks move nothing
        less: if all parameters fit in the device's buffers, with one micro-batch, and where flops_profiler counts; the
        log says so.

        Raises UsageError, before anything is run, if the iterator ends early or within a step. After any exception the
        gradients of the step are dropped.
        """
        self._check_open()
        self._conclude_backward()
        self._step.check(Call.TRAIN_BATCH)
        declared = None if blocks is None else blocks_of(self.module, blocks)
        drawn, before = draw(batches, self.batch.accumulation), self.global_steps
        self._step.check(Call.TRAIN_BATCH)  # the iterator may have used the engine
        try:
            return self._batches.train(drawn, loss_fn, declared, client_state)
        except BaseException:
            if self.global_steps == before:
                self._drop_failed_step()
            raise

    @contextmanager
    def _forwards_together(self, batches: Sequence[Any]) -> Iterator[None]:
        """Run the forwards of a step's micro-batches in the block, in turns."""
        for batch in batches:
            self._first_batches.see(batch)
        scope = self.parts.runner.scope
        installed = scope.enter(self._hooks.check_entry)
        try:
            self._additions.check()
            self._step.check(Call.READ, "the model was called")
            self.parts.schedule.trace.begin("vertical")
            self._reports.begin(Phase.FORWARD)
            yield
            self._reports.end(Phase.FORWARD)
        finally:
            scope.leave(installed)

    def _losses_together(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the scalars from which the backwards of a step start, checked as in `backward`."""
        if self.config.infinity.check_nan and not self.config.scales_loss and not self._step.skips_overflows:
            bad = [loss for loss in losses if not math.isfinite(self.parts.device.recorder.loss(loss.detach()))]
            refused = float(len(self.updates.pipeline.refused))
            self._check_loss((bad or losses)[0], *self.ranks.totals(float(bool(bad)), refused))
        for loss in losses:
            self._reports.add_loss(loss, len(losses))
        return [self.scale(loss) for loss in losses]

    def _drop_failed_step(self) -> None:
        """Drop the gradients of a whole step that an exception cut short."""
        if self._closed or self._broken:
            return
        if self._step.updated:
            self._broken = "engine.train_batch() failed after some units had been updated with its gradients"
        if self.parts.backward.conclude():
            self.parts.backward.reset()
        self.parts.schedule.trace.forget()
        self._abandon_step()

    @eager
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` × the fp16 loss scale / gradient_accumulation_steps, for loops that call `backward()`
        themselves. `engine.scale(loss).backward()` produces the same gradients as `engine.backward(loss)`.

        Without it a plain `loss.backward()` sums the gradients of micro-batches, as in PyTorch. The first one logs a
        warning; `engine.backward(loss, scale_wrt_gas=False)` sums without it. fp16 requires the scale: `step` raises
        UsageError for gradients that lack it. To sum in fp16, pass `loss * gradient_accumulation_steps`.
        """
        return self._scaled(loss, self.batch.accumulation)

    def expect_divided_losses(self) -> None:
        """Log no warning that `loss.backward()` sums, for front ends that divide the losses of micro-batches."""
        self._warns_of_sums = False

    def _scaled(self, loss: torch.Tensor, accumulation: int) -> torch.Tensor:
        scale = self.loss_scale.value
        if scale == accumulation == self.batch.accumulation == 1:
            return loss
        scaled, step = loss * (scale / accumulation), self._step
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: step.note_scaled())
        return scaled

    @eager
    def step(self, lr_kwargs: Mapping[str, Any] | None = None, *, client_state: dict[str, Any] | None = None) -> None:
        """Update the parameters and advance the lr scheduler if this was the last micro-batch of the step.

        lr_kwargs: arguments of the scheduler's `step`. client_state: a durable run (infinity.durable) commits it with
        the step, such as the position in the data, and `resume` returns it.

        A step whose gradients overflowed (fp16) is skipped, and the scheduler does not advance. Raises UsageError if no
        backward preceded it, in a `no_sync` block, and, before any change, if `lr_kwargs` do not fit the scheduler.
        """
        self._check_open()
        self._conclude_backward()
        self._step.check(Call.STEP)
        if not self._step.is_due:
            self._step.end_micro_batch()
            return
        self._hooks.check_replaced()
        arguments = step_arguments(self.lr_scheduler, lr_kwargs)
        skipped = self.skipped_steps
        loss, losses = self._reports.last_loss(self.micro_steps), self._reports.known_losses(self.micro_steps)
        self._reports.begin(Phase.STEP)
        durable = self.updates.durable
        with self.failing():
            if durable is not None:
                durable.begin_step()
            over = self.updates.saver.poll_finished(self.ranks)
            with uninterrupted():  # the scheduler advances with the update, whenever Ctrl-C arrives
                self.optimizer.step()
                rate = self.optimizer.param_groups[0]["lr"]
                self._log.step(self.global_steps, loss, rate, self._grad_norm.read)
                if self.lr_scheduler is not None and self.skipped_steps == skipped:
                    self.lr_scheduler.step(**arguments)
                if durable is not None:
                    durable.commit(self._progress(), self.module, client_state or {})
        self._reports.end(Phase.STEP)
        if self._reports.active:
            self._reports.step(
                steps=self.global_steps,
                samples=self.global_steps * self.batch.train,
                rate=float(self.optimizer.param_groups[0]["lr"]),
                losses=losses,
                loss_scale=self.loss_scale.value if self.config.fp16.enabled else None,
            )
        if over:
            self._finish_saving()
        if durable is not None:
            durable.check_kept()
        if durable is not None and durable.must_stop:
            self.close()
            raise SystemExit(128 + signal.SIGTERM)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of all backwards in the block, without an update.

        The first `step()` after the block with at least gradient_accumulation_steps micro-batches updates. Losses are
        divided by gradient_accumulation_steps, regardless of the number of micro-batches.

        In stages 0 and 1 gradients are not reduced in the block; the sum is reduced with the last micro-batch of the
        step, or in `step()`. In stages 2 and 3 a rank stores only its shard of the sum, so each micro-batch is reduced.

        With gradient_accumulation_steps 1, micro-batches are reduced one by one in all stages. Raises UsageError if
        gradients are then stored in less than `data_types.grad_accum_dtype`; set infinity.accumulation_buffers.
        """
        self._check_accumulates("engine.no_sync()")
        with self._step.no_sync():
            yield

    def _check_accumulates(self, what: str) -> None:
        """Raise UsageError if sums over micro-batches would lose precision that the config asks for."""
        if not self.parts.plan.sums:
            raise UsageError(
                f"{what} accumulates gradients over micro-batches, and without accumulation they are stored in less "
                "than data_types.grad_accum_dtype: set infinity.accumulation_buffers to true, or "
                "gradient_accumulation_steps to the number of micro-batches of a step"
            )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next micro-batches are the last of their steps, in place of counting them.

        False: backward accumulates, and `step()` does nothing. True: the next `step()` updates with the gradients
        collected since the last update. Call it before forward. Losses are divided by gradient_accumulation_steps,
        regardless of the number of micro-batches. Raises UsageError for False where `no_sync` does, and without
        managed_gradient_accumulation.
        """
        if not self._step.managed:
            raise UsageError(
                "engine.set_gradient_accumulation_boundary() was called, but managed_gradient_accumulation is false, "
                "so that every engine.step() is a boundary: remove the call, or set the key to true"
            )
        if not is_boundary:
            self._check_accumulates("engine.set_gradient_accumulation_boundary(False)")
        self._step.set_boundary(bool(is_boundary))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the present micro-batch is the last of its step, so that its `step()` updates."""
        return self._step.is_at_boundary

    def _check_scaled(self) -> None:
        unscaled, micro_steps = self._step.unscaled, self.micro_steps
        if self.loss_scale.value != 1.0 and unscaled:
            self.drop_gradients()
            raise unscaled_loss(unscaled, micro_steps, self.loss_scale.value)

    def drop_unused_gradients(self) -> None:
        """Drop unused gradients, for `optimizer.zero_grad`. Raises UsageError within a step."""
        if self.micro_steps == 0:
            return
        self._step.check(Call.ZERO_GRAD, "optimizer.zero_grad()")
        self.drop_gradients()

    def _end_step(self) -> None:
        """Reset the state of the step, after its gradients were passed to updates or dropped after an overflow."""
        self.updates.runner.end_step()
        self._reports.forget_losses()

    @uninterrupted()
    def apply_gradients(self) -> None:
        """Turn the step's stored gradients into pending updates and end the step, for `optimizer.step`."""
        self._check_open()
        self._step.check(Call.OPTIMIZER_STEP)
        if self.parts.backward.conclude():
            raise after_a_failed_backward()
        if self.micro_steps == 0:
            return
        if self.updates.durable is not None:
            self.updates.durable.check_begun()
        self._check_scaled()
        parts = self.parts
        self.updates.runner.use_hypers(self._step_hypers())
        self._send_all()
        self._first_batches.compare()
        if self._make_due():
            self._end_step()
            self.global_steps += 1
            parts.schedule.trace.end_step()
            if parts.plan.update == "after_backward":
                self.updates.runner.settle()
            parts.runner.refresh_viewed()
            if parts.plan.update != "after_backward":
                parts.runner.prefetch()
        parts.device.recorder.end_step()
        self.updates.profiler.end_step(self.ledger.tier_bytes)

    def _send_all(self) -> None:
        """Send all gradients. If the disk has no space for one, drop those of the step, or stop the engine if units
        were updated with them, or are updated by other ranks.
        """
        try:
            self.updates.runner.send_all()
        except OutOfSpaceError as error:
            if self._step.updated or not self.ranks.is_single:
                self._broken = str(error)
            else:
                self._abandon_step()
            raise

    def _step_hypers(self) -> list[Hyper | ParameterHyper]:
        """Return the present hyper-parameters. Raises UsageError if backward has updated units with other values, which
        would differ from a plain loop.
        """
        present = self.optimizer.hypers()
        if self._step.updated:
            for group, (now, used) in enumerate(zip(present, self.updates.runner.hypers, strict=True)):
                if names := now.changed(used):
                    raise changed_during_update(group, ", ".join(names))
        return present

    def _expected(self) -> tuple[float, float]:
        """Return the factor of gradients, summed over ranks, if `step` has to scale none, and the sum of squares of
        gradients above which it has to.
        """
        scale = 1.0 / (self.parts.plan.grad_divisor * self.loss_scale.value)
        norm = (self.config.gradient_clipping or math.inf) / scale
        return scale, norm * norm  # inf for limits that are never reached, where ** would raise

    def _make_due(self) -> bool:
        """Turn stored gradients into pending updates, and start those of units that are in a buffer. Return False if
        the gradients overflowed and the step is skipped.
        """
        parts = self.parts
        gradients = self.updates.gradients
        for unit in parts.units:
            if unit.update is not None and unit.update.done.done():
                unit.update.done.wait()
        scale, _ = self._expected()
        self._grad_norm.forget()
        clipping, scaled = self.config.gradient_clipping > 0, self.config.scales_loss
        if clipping or scaled or (self.config.infinity.check_nan and (gradients.units or not self.ranks.is_single)):
            sums = gradients.squared_norms()
            if parts.ranks.model.size > 1:
                with parts.device.recorder.wait("reduce", "collectives"):
                    sums = parts.ranks.model.sums(*sums)
            norm, whole = (math.sqrt(total) * scale for total in sums)
            if not math.isfinite(norm) and (scaled or self._step.skips_overflows):
                self._skip()
                return False
            self._check_norm(norm)
            self._grad_norm.set(whole)
            if clipping:
                coefficient = self.config.gradient_clipping / (norm + 1e-6)
                scale *= coefficient if not coefficient > 1.0 else 1.0  # NaN propagates, as in torch
        elif self.ranks.is_single:
            self._grad_norm.set_later(gradients.step_squares(), scale)
        self.updates.runner.make_due(scale)
        self.loss_scale.passed()
        return True

    def _skip(self) -> None:
        """Drop the step's gradients, which are not finite, and adjust the loss scale and the counters."""
        self.updates.gradients.settle()
        self._end_step()
        self.parts.schedule.speculation.end_step(scaled=True)
        self.global_steps += 1
        self.parts.schedule.trace.end_step()
        self.skipped_steps += 1
        before = self.loss_scale.value
        self.loss_scale.overflowed()
        if self.ranks.is_main_rank:
            now = f"; loss scale {before:g} → {self.loss_scale.value:g}" if self.config.scales_loss else ""
            logger.info("step %d skipped: its gradients overflowed%s", self.global_steps, now)

    # -- non-finite values -------------------------------------------------------------------------------------------

    @contextmanager
    def _checked(self, loss: torch.Tensor) -> Iterator[None]:
        """Raise NonFiniteError on all ranks, before any change, if a loss or an earlier gradient is not finite.

        The block runs the backward of `loss`. A loss on an accelerator is read after the block, whose updates wait for
        it: a wait before the block would let the device stand still until the host has issued the first kernels.
        """
        if not self.config.infinity.check_nan or self.config.scales_loss or self._step.skips_overflows:
            yield
            return
        refused = len(self.updates.pipeline.refused)
        if not self._checks_later(loss):
            bad = not math.isfinite(self.parts.device.recorder.loss(loss.detach()))
            self._check_loss(loss, *self.ranks.totals(float(bad), float(refused)))
            yield
            return
        assert self._loss_reader is not None
        if self.ranks.is_single:
            self._check_refused(refused)
        check = LossCheck(self._loss_reader, loss, self.ranks, refused)
        try:
            with self.updates.runner.checking(check):
                yield
        except Exception:
            if self.ranks.is_single:  # on several, the others may not exchange now
                self._conclude_check(loss, check)  # NaN may be the reason of the exception
            raise
        self._conclude_check(loss, check)

    def _checks_later(self, loss: torch.Tensor) -> bool:
        """Return whether the loss is checked while its backward is issued.

        Gradients of the step's earlier micro-batches are kept if the loss is not finite, so nothing may be added to
        them before it is checked. Ranks of tensor parallelism exchange in the model's thread.
        """
        if self._loss_reader is None or self.micro_steps or self.ranks.model.size > 1:
            return False
        return self._loss_reader.can_read(loss)

    def _conclude_check(self, loss: torch.Tensor, check: LossCheck) -> None:
        """Raise the error of a loss whose backward has ended. Its updates did nothing."""
        check.start()
        bad, refused = check.result()
        if bad:
            super()._conclude_backward()
            self._abandon_step()
            self.parts.runner.refresh_viewed()  # views were to show the updated parameters
        self._check_loss(loss, bad, refused)

    def _check_loss(self, loss: torch.Tensor, bad: float, refused: float) -> None:
        """Raise NonFiniteError if `bad` losses, or earlier gradients of `refused` units, are not finite."""
        self._check_refused(refused)
        if bad:
            ranks = self.ranks.size * self.ranks.model.size
            raise NonFiniteError(
                f"the loss is {loss.item()} in step {self.global_steps + 1} (on {bad:.0f} of {ranks} ranks). "
                "This step updated nothing: lower the learning rate, set gradient_clipping, or inspect this batch. "
                "Code that bypasses __torch_function__ (torch.vmap, torch.tensor, TorchScript) reads NaN from weights: "
                "pass weight.clone() to it."
            )

    def _check_norm(self, norm: float) -> None:
        """Raise NonFiniteError if `norm`, of the gradients not yet applied and equal on all ranks, is not finite."""
        if math.isfinite(norm) or not self.config.infinity.check_nan:
            return
        spent = len(self._step.updated)
        self.updates.gradients.settle()
        self._end_step()
        self._check_refused(spent)  # units that other gradients have updated stop the engine, as refused ones do
        raise NonFiniteError(
            f"the gradient norm is {norm} in step {self.global_steps + 1}. This step updated nothing: lower the "
            "learning rate, or inspect this batch."
        )

    def _check_refused(self, refused: float) -> None:
        """Raise NonFiniteError if updates during backward skipped units. refused: number of them over all ranks."""
        if not refused:
            return
        names = ", ".join(self.updates.pipeline.refused) or "on another rank"
        self._broken = f"a gradient was NaN or infinite ({names}) after other units were updated in the same step"
        raise NonFiniteError(
            f"{self._broken}. Load the last checkpoint, and lower the learning rate, set gradient_clipping, or set "
            'infinity.update to "next_forward", which checks all gradients before the first update.'
        )

    # -- callbacks of the hooks --------------------------------------------------------------------------------------

    def _on_forward(self, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._additions.check()
            self._first_batches.see(arguments)
        self._step.check(Call.READ, "the model was called")
        self._reports.compute("forward")
        training = torch.is_grad_enabled()
        self.parts.schedule.trace.begin("train" if training else "eval")

    def _on_backward(self) -> None:
        self._check_reaches_no_updated_unit()
        self._reports.begin(Phase.BACKWARD)
        self._step.begin_backward()
        if self.updates.durable is not None:
            self.updates.runner.start_due_updates()  # updates of this backward wait for a commit, and that for these
        self.updates.runner.begin_backward(self.optimizer.hypers(), *self._expected())
        if not self.ranks.is_single and has_backward_hooks(self.module):
            self.parts.runner.edits.begin_backward()  # the hooks may edit parameters

    def _check_reaches_no_updated_unit(self) -> None:
        """Raise UsageError if the backward that begins has gradients for units that the step's last one has updated."""
        units, updated = self.parts.units, self._step.updated
        if any(self.parts.coming.reaches(units[index]) for index in updated):
            self.parts.backward.reset()  # nothing has arrived: engine.step() ends the step without this backward
            self._step.check(Call.BACKWARD)

    def _on_backward_end(self) -> None:
        self._step.end_backward(counts=self.updates.runner.end_backward())
        self._reports.end(Phase.BACKWARD)
        if self._step.averages_plain:  # infinity.deepspeed, which refuses an unscaled loss at once, as DeepSpeed does
            self._check_scaled()
        elif self._step.unscaled and self._warns_of_sums:
            self._warns_of_sums = False
            if self.loss_scale.value == 1.0:  # else `step` refuses these gradients
                warn_of_sums(self.batch.accumulation)

    def _conclude_backward(self) -> None:
        """Drop the gradients of a backward that an exception cut short, and those accumulated before it."""
        if not self.parts.backward.conclude():
            return
        self.parts.runner.edits.forget_backward()
        if self._step.updated:
            self._broken = "a backward failed after some units had been updated with its gradients"
        self._abandon_step()
        super()._conclude_backward()
        self._check_open()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Stop the engine on errors in the block that leave states inconsistent. See `BaseEngine.failing`."""
        with super().failing():
            try:
                yield
            except (LifetimeError, NonFiniteError) as error:
                if self._step.updated:
                    self._broken = str(error)
                raise

    def get_global_grad_norm(self) -> float | None:
        """Return `grad_norm`."""
        return self.grad_norm

    # -- profile -----------------------------------------------------------------------------------------------------

    def profile(self, steps: int = 3, out: str | os.PathLike[str] = "trace.json") -> None:
        """Record the next `steps` optimizer steps and write a trace for Perfetto (ui.perfetto.dev) to `out`.

        The trace has a lane for compute, for each kind of transfer and for the update, and counters of the bytes in
        each tier; `infinity timeline` prints and draws it. Recording begins now, or at the end of a step that is under
        way, and changes no result. The file appears when the last step has ended, or with the steps so far when the
        engine is closed or the process ends. Other ranks write files of their own, such as trace.rank1.json.

        Raises UsageError if `steps` is less than 1, if `out` cannot be written, and while another profile goes on.
        """
        self._check_open()
        is_between = not self._step.micro_steps and not self.parts.backward.running
        self.updates.profiler.begin(steps, out, self.ledger.tier_bytes() if is_between else None)

    # -- memory between phases ---------------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Free this engine's device memory until `reload_states`, as between the phases of RLHF. Collective.

        States on the device move to host memory, in which they must fit, and the buffers of the device are freed. Uses
        of the model raise UsageError meanwhile; checkpoints can be saved. On a CPU only the buffers are freed, since
        the states are in host memory already. Call it between two steps. Idempotent.
        """
        self._check_between_steps("the offloaded memory")
        self._check_open()
        self.updates.saver.join()
        self.settle()
        with self.failing():
            if self.updates.durable is not None:
                self.updates.durable.wait()
            offload(self.parts)

    def reload_states(self) -> None:
        """Move the states back to the device, with the same bits, and allocate its buffers. Idempotent."""
        self._check_open()
        with self.failing():
            reload(self.parts)

    # -- between steps ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Execute pending updates and wait until every state is in its tier.

        Raises UsageError between backward and step if backward has already updated units, and if modules of the model
        hold other tensors in place of their parameters.
        """
        self._check_open()
        self._hooks.check_replaced()
        self._conclude_backward()
        self._step.check(Call.READ, "the parameters were read")
        self._settle()

    def _settle(self) -> None:
        self.parts.runner.edits.check_held_back()
        with self.failing():
            self.updates.runner.settle()
            self._check_refused(
                *self.ranks.totals(float(len(self.updates.pipeline.refused)), operation=Operation.READ_STATES)
            )
        super().settle()

    def drop_gradients(self) -> None:
        """Drop the gradients collected since the last step. Raises UsageError if units were updated with them."""
        self._step.check(Call.DROP_GRADIENTS, "engine.drop_gradients()")
        self._abandon_step()

    def _abandon_step(self) -> None:
        self.updates.runner.discard()
        self._reports.forget_losses()

    def _check_between_steps(self, what: str) -> None:
        self._step.check(Call.STATES, what)

    # -- shutdown ----------------------------------------------------------------------------------------------------

    def close(self, *, restore: bool = False) -> None:
        """Finish pending updates and a background save, remove hooks, release threads, memory and disk. Idempotent.

        The model keeps its parameters' values if they are unsharded in this rank's memory (`offload_param.device` none
        or cpu; one rank or a stage below 3) and a copy fits on the device or in host memory. Otherwise any use of a
        parameter raises UsageError.

        restore: return all values to the model; the call is collective then. Raises OutOfMemoryError if they do not
        fit, after everything is released. Raises UsageError if an earlier `close` discarded them, and CheckpointError
        if the save failed.
        """
        if os.getpid() != self._process:
            return
        for handle in self._watches:
            handle.remove()
        self._additions.close()
        self.monitor.close()
        with self.updates.saver.closing():
            try:
                self.updates.profiler.close()
            finally:
                super().close(restore=restore)

    def _finish(self) -> None:
        self.updates.runner.settle()
        self._check_refused(len(self.updates.pipeline.refused))
        if self.updates.durable is not None:
            self.updates.durable.finish()

"""Runs whole steps for `engine.train_batch`: draws the micro-batches, and chooses their order.

The first step runs in the ordinary order and records which blocks the model calls. Later steps run them vertically
(`infinity.engine.vertical`) if the result is provably the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity.comm.communicator import Communicator
from infinity.engine.block_calls import BlockCalls
from infinity.engine.global_state import RandomState
from infinity.engine.loss_check import check_scalar
from infinity.engine.micro_batch import LossFunction, draw, loss_of
from infinity.engine.model_state import ModelState
from infinity.engine.parts import EngineParts, UpdateParts
from infinity.engine.pieces import NotInPieces
from infinity.engine.reports import StepReports
from infinity.engine.vertical import Forward, VerticalOrder, backward, hooked, is_plain_thread
from infinity.errors import InfinityError, ModelError
from infinity.model.added import Additions
from infinity.model.hooks import ModelHooks
from infinity.observe.clock import Phase
from infinity.observe.log import logger
from infinity.observe.monitor import Monitor
from infinity.plan import pools
from infinity.schedule.step import Call
from infinity.units.compiled import is_compiled

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.config.batch import Batch


class Trainer(Protocol):
    """The parts of the training engine that a step needs (`infinity.engine.training`)."""

    module: nn.Module
    config: Config
    parts: EngineParts
    batch: Batch
    updates: UpdateParts
    monitor: Monitor
    global_steps: int
    _hooks: ModelHooks
    _additions: Additions
    _reports: StepReports
    _loss: torch.Tensor
    _closed: bool
    _broken: str

    @property
    def device(self) -> torch.device: ...
    @property
    def ranks(self) -> Communicator: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor) -> torch.Tensor: ...
    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...
    def step(self, *, client_state: dict[str, Any] | None = None) -> None: ...
    def _check_open(self) -> None: ...
    def _conclude_backward(self) -> None: ...
    def _check_readable(self, what: str) -> None: ...
    def _check_loss(self, loss: torch.Tensor, bad: float, refused: float) -> None: ...
    def _abandon_step(self) -> None: ...
    def _on_backward(self) -> None: ...
    def _on_backward_end(self) -> None: ...
    def _failing(self) -> AbstractContextManager[None]: ...


class BatchTrainer:
    """Runs the steps of one engine."""

    def __init__(self, engine: Trainer) -> None:
        self._engine = engine
        self._order: VerticalOrder | None = None
        self.reason = ""
        """Why the model was found not to fit, so that all steps run in the ordinary order; empty: it was not."""

    def train(
        self, batches: Iterator[Any], loss_fn: LossFunction | None, client_state: dict[str, Any] | None
    ) -> torch.Tensor:
        """Run one step. Returns the mean loss, without a graph. After an exception the step's gradients are dropped.

        client_state: as of `step`.
        """
        engine = self._engine
        engine._check_open()
        engine._conclude_backward()
        engine.parts.schedule.step.check(Call.TRAIN_BATCH)
        drawn, before = draw(batches, engine.batch.accumulation), engine.global_steps
        engine.parts.schedule.step.check(Call.TRAIN_BATCH)  # the iterator may have used the engine
        try:
            losses = self._run(drawn, loss_fn, partial(engine.step, client_state=client_state))
        except BaseException:
            if engine.global_steps == before:
                self._abandon()
            raise
        total = losses[0].detach()
        for loss in losses[1:]:
            total = total + loss.detach()
        return total / len(losses)

    def _run(
        self, batches: list[Any], loss_fn: LossFunction | None, end_micro_batch: Callable[[], None]
    ) -> list[torch.Tensor]:
        if len(batches) == 1 or self.reason or self._is_profiled:
            return self._ordinary(batches, loss_fn, end_micro_batch)
        reason = self._obstacle()
        if reason is not None:
            self._say(reason)
            return self._ordinary(batches, loss_fn, end_micro_batch)
        if self._order is None:
            return self._recorded(batches, loss_fn, end_micro_batch)
        losses = self._vertical(self._order, batches, loss_fn)
        if losses is None:
            return self._ordinary(batches, loss_fn, end_micro_batch)
        end_micro_batch()
        return losses

    def _obstacle(self) -> str | None:
        """Return why no step may run vertically, as far as is known before this one."""
        engine, parts = self._engine, self._engine.parts
        if parts.plan.buffers(pools.UNITS) >= len(parts.units):
            return "all parameters fit in the buffers of the device, so none would move less often"
        if is_compiled(engine.module):
            return "the model is compiled"
        if engine.ranks.model.size > 1:
            return "the model runs in tensor parallelism"
        if (name := hooked(engine.module)) is not None:
            return f"{name or 'the model'} has hooks, which would run in another order"
        if not is_plain_thread(engine.parts.device):
            return "train_batch() was called in a context of this thread (autocast, a mode, hooks or a stream)"
        return None

    @property
    def _is_profiled(self) -> bool:
        """Return whether `flops_profiler` counts this step, in the order of a loop."""
        profiler = self._engine.config.flops_profiler
        return profiler.enabled and profiler.profile_step == self._engine.global_steps

    def _say(self, reason: str) -> None:
        if self._engine.ranks.is_main_rank:
            logger.info("train_batch: micro-batches run one after the other, since %s", reason)
        self.reason = reason

    # -- ordinary ----------------------------------------------------------------------------------------------------

    def _ordinary(
        self, batches: list[Any], loss_fn: LossFunction | None, end_micro_batch: Callable[[], None]
    ) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            loss = loss_of(self._engine, batch, loss_fn)
            self._engine.backward(loss)
            end_micro_batch()
            losses.append(loss.detach())
        return losses

    def _recorded(
        self, batches: list[Any], loss_fn: LossFunction | None, end_micro_batch: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Run a step in the ordinary order, and find the blocks for the next ones."""
        engine = self._engine
        random, calls = RandomState(engine.device), BlockCalls(engine.module)
        losses: list[torch.Tensor] = []
        state: ModelState | None = None
        changed: str | None = None
        with calls:
            for batch in batches:
                loss = loss_of(engine, batch, loss_fn)
                if state is None:
                    # after the first forward, which may fill caches
                    state = ModelState(engine.module, loss_fn, batches, by_value=True)
                changed = changed or state.changed()
                calls.end()
                engine.backward(loss)
                losses.append(loss.detach())
                end_micro_batch()
        blocks, reason = calls.sequence(), None
        if random.moved():
            reason = "the model draws random numbers, as for dropout"
        elif changed is not None:
            reason = f"the model's forward changes attributes (of a {changed}), which micro-batches would share"
        elif calls.differentiated:
            reason = "the model's forward differentiates through its blocks"
        elif blocks is None:
            reason = "the model does not call the blocks of one list one after the other"
        found = None if reason is not None or blocks is None else [calls.numbers[block] for block in blocks]
        if any(other != found for other in engine.ranks.gather(found)):
            reason = reason or "ranks found different blocks"
        if reason is None:
            assert blocks is not None
            self._order = VerticalOrder(blocks, engine.parts)
        else:
            self._say(reason)
        return losses

    # -- vertical ----------------------------------------------------------------------------------------------------

    def _vertical(
        self, order: VerticalOrder, batches: list[Any], loss_fn: LossFunction | None
    ) -> list[torch.Tensor] | None:
        """Run a step block by block, up to its update. Returns None, without a change of any state, if the model does
        not fit.
        """
        engine = self._engine
        random, state = RandomState(engine.device), ModelState(engine.module, loss_fn, batches)
        reason: str | None = None
        forwards: list[Forward] = []
        with self._open_scope():
            try:
                if state.unreadable is not None:
                    raise NotInPieces(f"it reaches a {state.unreadable}, whose contents cannot be compared")
                forwards = order.forward(batches, lambda batch: loss_of(engine.module, batch, loss_fn), state)
                held = order.hold(forwards)
            except NotInPieces as error:
                reason = str(error)
            except RuntimeError as error:  # such as an edit in place of a cut tensor; other ranks wait for this one
                if isinstance(error, InfinityError) or not engine.ranks.is_single:
                    raise
                reason = f"the model's forward raised an error with all of them together ({error})"
        if random.moved():
            reason = reason or "the model draws random numbers"
        if engine.ranks.totals(float(reason is not None))[0]:
            for forward in forwards:
                forward.cancel()
            random.restore()
            engine.parts.schedule.trace.forget()
            if state.unreadable is None and not state.restore():
                raise ModelError(
                    f"engine.train_batch(): the forward changed a {state.changed()} that all micro-batches share, for "
                    "the first time in this step. Nothing was updated. Call engine.backward() and engine.step() for "
                    "each micro-batch instead."
                )
            self._say(reason or "another rank cannot run them together")
            return None
        losses = [forward.loss for forward in forwards if forward.loss is not None]
        scaled = self._scaled(losses)
        runner, step = engine.updates.runner, engine.parts.schedule.step
        with engine._failing(), runner.in_pieces(held), ExitStack() as piece:

            def begin(micro_batch: int, number: int) -> None:
                held.begin(micro_batch, number)
                piece.close()
                piece.enter_context(step.in_pieces(micro_batch))

            def end() -> None:
                if held.is_due:  # no gradient arrived in this piece
                    engine._on_backward()
                    engine._on_backward_end()

            backward(forwards, scaled, begin, end)
        if random.moved():
            raise ModelError(
                "engine.train_batch(): the backward drew random numbers for the first time, so results would differ "
                "from those of a loop. Call engine.backward() and engine.step() for each micro-batch instead."
            )
        if (changed := state.changed()) is not None:
            raise ModelError(
                f"engine.train_batch(): the backward changed a {changed} for the first time, so results would differ "
                "from those of a loop. Call engine.backward() and engine.step() for each micro-batch instead."
            )
        step.end_pieces()
        return [loss.detach() for loss in losses]

    @contextmanager
    def _open_scope(self) -> Iterator[None]:
        """Run the forwards of one step in the block."""
        engine, scope = self._engine, self._engine.parts.runner.scope
        installed = scope.enter(engine._hooks.check_entry)
        try:
            engine._additions.check()
            engine._check_readable("the model was called")
            engine.parts.schedule.trace.begin("vertical")
            engine._reports.begin(Phase.FORWARD)
            with engine._failing():
                yield
            engine._reports.end(Phase.FORWARD)
        finally:
            scope.leave(installed)

    def _scaled(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the scalars from which backward starts. Raises NonFiniteError as `engine.backward` does."""
        engine = self._engine
        for loss in losses:
            check_scalar(loss)
        if engine.config.infinity.check_nan and not engine.config.scales_loss:
            bad = [loss for loss in losses if not math.isfinite(loss.detach().item())]
            refused = float(len(engine.updates.pipeline.refused))
            engine._check_loss((bad or losses)[0], *engine.ranks.totals(float(bool(bad)), refused))
        engine._loss = losses[-1].detach()
        if engine.monitor.enabled:
            engine._reports.losses += [(loss.detach(), len(losses)) for loss in losses]
        return [engine.scale(loss) for loss in losses]

    def _abandon(self) -> None:
        """Drop the gradients of a step that an exception cut short."""
        engine = self._engine
        if engine._closed or engine._broken:
            return
        if engine.parts.schedule.step.updated:
            engine._broken = "engine.train_batch() failed after some units had been updated with its gradients"
        if engine.parts.backward.conclude():
            engine.parts.backward.reset()
        engine.parts.schedule.trace.forget()
        engine._abandon_step()

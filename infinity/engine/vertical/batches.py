"""Runs whole steps for `engine.train_batch`: as a loop over the micro-batches, or block by block.

`infinity.debug`: the first step with `blocks` is run in both orders, and compared bit by bit before its update.

The loop's gradients are those of the ordinary accumulation, without an update. Then they are dropped, and buffers and
generators of random numbers are restored. The vertical step is the first of its cycle in the trace, so that its
backward updates nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity.comm.communicator import Communicator
from infinity.engine.parts import EngineParts
from infinity.engine.vertical.checks import BufferChanges, LossFunction, RandomState, check_context, loss_of
from infinity.engine.vertical.order import Forward, VerticalOrder, backward
from infinity.engine.vertical.pieces import refused
from infinity.errors import ModelError, UsageError
from infinity.grads.held import HeldGradients
from infinity.observe.log import logger
from infinity.plan import pools

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class Outcome:
    """Digests of what the forwards and backwards of a step have left, by name: losses, gradients, then buffers."""

    digests: Mapping[str, bytes]

    @classmethod
    def of(cls, model: nn.Module, parts: EngineParts, losses: Sequence[torch.Tensor]) -> Outcome:
        """Collective, since gradients are read whole."""
        found = {f"the loss of micro-batch {number}": _digest(loss) for number, loss in enumerate(losses)}
        assert parts.training is not None
        parts.training.runner.send_all()
        gradients = parts.training.gradients
        for unit in (parts.units[index] for index in sorted(gradients.units)):
            flat = gradients.read(unit)
            for slot in sorted(gradients.slots[unit.index]):
                place = unit.layout.slots[slot]
                found[f"the gradient of {place.name}"] = _digest(flat[place.offset : place.stop])
        return cls(found | {f"buffer {name}": _digest(buffer) for name, buffer in model.named_buffers()})

    def check(self, expected: Outcome, ranks: Communicator) -> None:
        """Raise ModelError on all ranks if this, of a vertical step, differs from that of a loop on one. Collective."""
        names = (*expected.digests, *self.digests)
        differs = next((n for n in names if self.digests.get(n) != expected.digests.get(n)), "")
        for rank, name in enumerate(ranks.gather(differs)):
            if name:
                where = "" if ranks.is_single else f" on rank {rank}"
                raise ModelError(
                    f"engine.train_batch(blocks=...): {name} differs from that of a loop over the micro-batches{where} "
                    "(infinity.debug compares the first step). Nothing was updated. The forward changes something that "
                    "another micro-batch reads: remove that, or leave blocks out."
                )


class Buffers:
    """The present buffers of a model, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        for module, name, buffer, values in self._saved:
            with torch.no_grad():
                module._buffers[name] = buffer.copy_(values)


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + bytes(values.view(torch.uint8).numpy())).digest()


class Loop(Protocol):
    """The calls of a training loop (`infinity.engine.training`)."""

    module: nn.Module
    config: Config
    parts: EngineParts
    global_steps: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor) -> torch.Tensor: ...
    def step(self, *, client_state: dict[str, Any] | None = None) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def drop_gradients(self) -> None: ...


@dataclass(frozen=True)
class Together:
    """The engine's part of a step whose micro-batches run together."""

    forwards: Callable[[Sequence[Any]], AbstractContextManager[None]]
    """Micro-batches → context of their forwards."""
    scaled: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    """Losses → those from which backward starts. Raises NonFiniteError as `engine.backward` does."""
    backwards: Callable[[], AbstractContextManager[None]]
    """Context of all backwards."""


class BatchTrainer:
    """Runs the steps of one engine."""

    def __init__(self, engine: Loop, together: Together) -> None:
        self._engine = engine
        self._together = together
        self._order: VerticalOrder | None = None
        self._is_compared = False
        self.reason = ""
        """Why the last step ran as a loop although it had blocks; empty: it did not."""

    def train(
        self,
        batches: list[Any],
        loss_fn: LossFunction | None,
        blocks: tuple[nn.Module, ...] | None,
        client_state: dict[str, Any] | None,
    ) -> torch.Tensor:
        """Run one step on its micro-batches. Returns the mean loss, without a graph. blocks: as of `blocks_of`."""
        if blocks is not None and self._is_vertical(len(batches)):
            losses = self._vertical(blocks, batches, loss_fn)
            self._engine.step(client_state=client_state)
        else:
            losses = self._looped(batches, loss_fn, client_state)
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total / len(losses)

    def _looped(
        self, batches: list[Any], loss_fn: LossFunction | None, client_state: dict[str, Any] | None
    ) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            loss = loss_of(self._engine, batch, loss_fn)
            self._engine.backward(loss)
            self._engine.step(client_state=client_state)
            losses.append(loss.detach())
        return losses

    def _is_vertical(self, count: int) -> bool:
        """Return whether the vertical order would move less than a loop, which has the same result."""
        engine, parts = self._engine, self._engine.parts
        profiler, before = engine.config.flops_profiler, self.reason
        self.reason = ""
        if count == 1:
            self.reason = "gradient_accumulation_steps is 1"
        elif parts.plan.buffers(pools.UNITS) >= len(parts.units):
            self.reason = "all parameters fit in the buffers of the device, so none would move less often"
        elif profiler.enabled and profiler.profile_step == engine.global_steps:
            self.reason = "flops_profiler counts this one"
        if self.reason and self.reason != before and parts.ranks.is_main_rank:
            logger.info("train_batch: the step runs as a loop although it has blocks, since %s", self.reason)
        return not self.reason

    # -- vertical ----------------------------------------------------------------------------------------------------

    def _vertical(
        self, blocks: tuple[nn.Module, ...], batches: list[Any], loss_fn: LossFunction | None
    ) -> list[torch.Tensor]:
        """Run a step block by block, up to its update. Returns the losses.

        Raises UsageError or ModelError if a check fails. The other ranks, which may wait in a collective of the step,
        raise RanksError then.
        """
        parts = self._engine.parts
        random = RandomState(parts.device.torch_device)
        try:
            check_context(self._engine.module, parts)
            expected = self._expected(batches, loss_fn, random)
            forwards, held = self._forward(blocks, batches, loss_fn)
            _check_draws(random)
            losses = [forward.loss for forward in forwards if forward.loss is not None]
            buffers = BufferChanges(self._engine.module)
            self._backward(forwards, losses, held)
            buffers.check_backward()
            if random.moved():
                raise ModelError(
                    "engine.train_batch(blocks=...): the backward draws random numbers, as for dropout, in another "
                    "order than a loop. Leave blocks out: the micro-batches then run one after the other."
                )
            losses = [loss.detach() for loss in losses]
            if expected is not None:
                Outcome.of(self._engine.module, parts, losses).check(expected, parts.ranks)
                self._is_compared = True
        except (ModelError, UsageError) as error:
            if random.moved():
                random.restore()
            parts.ranks.give_up(error)
            raise
        return losses

    def _expected(self, batches: list[Any], loss_fn: LossFunction | None, random: RandomState) -> Outcome | None:
        """Return the outcome of a loop, without an update, if this step is to be compared with it."""
        engine, losses = self._engine, []
        if self._is_compared or not engine.parts.plan.debug or engine.parts.device.torch_device.type == "meta":
            return None
        buffers = Buffers(engine.module)
        with engine.no_sync():
            for batch in batches:
                loss = loss_of(engine, batch, loss_fn)
                engine.backward(loss)
                losses.append(loss.detach())
        outcome = Outcome.of(engine.module, engine.parts, losses)
        engine.drop_gradients()
        buffers.restore()
        _check_draws(random)
        return outcome

    def _forward(
        self, blocks: tuple[nn.Module, ...], batches: list[Any], loss_fn: LossFunction | None
    ) -> tuple[list[Forward], HeldGradients]:
        """Run all forwards. After an exception their graphs are dropped."""
        if self._order is None or self._order.blocks != blocks:
            self._order = VerticalOrder(self._engine.module, blocks, self._engine.parts)
        with self._together.forwards(batches):
            forwards = self._order.forward(batches, lambda batch: loss_of(self._engine.module, batch, loss_fn))
            try:
                return forwards, self._order.hold(forwards)
            except BaseException:
                for forward in forwards:
                    forward.cancel()
                raise

    def _backward(self, forwards: list[Forward], losses: list[torch.Tensor], held: HeldGradients) -> None:
        parts = self._engine.parts
        assert parts.training is not None
        collector, step = parts.training.collector, parts.schedule.step
        scaled = self._together.scaled(losses)
        with self._together.backwards(), collector.in_pieces(held), ExitStack() as piece:

            def begin(micro_batch: int, number: int) -> None:
                held.begin(micro_batch, number)
                piece.close()
                piece.enter_context(step.in_pieces(micro_batch))

            def end() -> None:
                if held.is_due:  # no gradient arrived in this piece
                    parts.backward.run_empty()

            backward(forwards, scaled, begin, end)
        step.end_pieces()


def _check_draws(random: RandomState) -> None:
    if random.moved():
        raise refused("the forward draws random numbers, as for dropout, in another order than a loop")

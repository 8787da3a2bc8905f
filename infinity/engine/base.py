"""Base of the engines for training and inference: runs a model with parameters in tiers, reads it, and closes."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from infinity.checkpoint.format import Progress, aliases_of_buffers, persistent_buffers
from infinity.comm.agreement.announcements import Announcement, Operation
from infinity.comm.communicator import Communicator
from infinity.engine.describe import describe, kept, left_under_limit
from infinity.engine.input_dtypes import InputDtypes
from infinity.engine.parts import EngineParts
from infinity.engine.precision import ForwardPrecision, cast_buffers
from infinity.engine.restore import end_collected, restoring
from infinity.errors import RanksError, StorageError, UpdateError, UsageError
from infinity.interrupts import ForcedInterrupt
from infinity.model import bitsandbytes
from infinity.model.hooks import ModelHooks
from infinity.nn.pieces import Assembly, Piece, Pieces
from infinity.observe.ledger import Ledger
from infinity.observe.log import logger, show_by_default
from infinity.observe.without_engine import engine_constructed
from infinity.units.compiled import breaks_graphs, eager, own_name, uncompiled
from infinity.units.released import is_released
from infinity.units.stored import Wrappers, stored_in
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.config import Config

_Engine = TypeVar("_Engine", bound="BaseEngine")

open_engines: weakref.WeakSet[BaseEngine] = weakref.WeakSet()
"""Engines that are not closed. `infinity.engine.gather` finds the owner of a parameter among them."""


class BaseEngine(ABC):
    """Runs `module`, whose parameters `parts` manages. Base class of all engines."""

    _maker: ClassVar[str]
    """The function that constructs such an engine, for messages."""
    _remedy: ClassVar[str] = "make a new one"
    """The fix after the engine has stopped, for messages."""
    global_steps: int
    """Number of steps so far; 0 for inference without a loaded checkpoint."""
    skipped_steps: int
    """Number of those that were skipped."""

    def __init__(self, model: nn.Module, config: Config, parts: EngineParts, dtype: torch.dtype | None) -> None:
        """dtype: that of all floating-point parameters; None: their own."""
        self._end = parts.closer()
        self._finalizer = weakref.finalize(self, end_collected, self._end, os.getpid())
        self.module = uncompiled(model)
        """The model without the wrapper of `torch.compile(model)`, whose parameter names lack its prefix."""
        self._called: Callable[..., Any] = model
        self.config = config
        """The configuration, with all defaults."""
        self.parts = parts
        """Units, tiers, pools and threads. Internal."""
        waits = parts.device.recorder.waits
        self.ledger = Ledger(parts.counters, parts.tier_bytes, parts.device.peak_bytes, waits, parts.spare)
        """Measured bytes and seconds: what each tier holds, and what was moved since the engine was constructed."""
        self._broken = ""
        self._closed = False
        self._end_stream: Callable[[], None] = _nothing
        self._process = os.getpid()
        cast_buffers(self.module, config)
        self._precision = ForwardPrecision.of(config, parts.device.torch_device, dtype)
        self._input_dtypes = InputDtypes.of(config, dtype)
        self._hooks = ModelHooks(self.module, parts.units_of_module, parts.runner, parts.coming, self)
        open_engines.add(self)
        engine_constructed()
        show_by_default()
        if parts.ranks.is_main_rank:
            if line := config.notes.line():
                logger.info("config: %s", line)
            lines = [self.describe(), *kept(config, parts.plan), *left_under_limit(parts.plan)]
            logger.info("units and where their states live\n%s", "\n".join(lines))

    @abstractmethod
    def _on_forward(self, arguments: object) -> None:
        """Called with (args, kwargs) when an outermost forward of the root module begins, outside of any backward."""

    def _on_entry(self) -> None:
        """Called when an outermost forward of any module that holds units begins, outside of any backward."""
        self._check_open()
        self._conclude_backward()
        self.parts.runner.edits.check_codes()

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in place of `call`, a forward of the root."""
        run = call if self._precision is None else self._precision.around(call)
        return run if self._input_dtypes is None else self._input_dtypes.around(run)

    def _conclude_backward(self) -> None:
        """Discard a backward that an exception cut short. Call outside of any backward."""
        if self.parts.backward.conclude():
            self.parts.backward.reset()
            self.parts.schedule.trace.forget()

    def _on_backward(self) -> None:  # noqa: B027 - inference has nothing to prepare
        """Called when a backward begins."""

    def _on_backward_end(self) -> None:  # noqa: B027 - inference has nothing to end
        """Called when a backward ends without an exception."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self._run(self._called, *args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, as in transformers.

        In stage 3 with several ranks it is collective, and all ranks continue until the last sequence is finished
        (transformers' `synced_gpus`, which direct calls of `engine.module.generate` must pass). Raises UsageError if
        the model has no `generate`.
        """
        generate = getattr(self.module, "generate", None)
        if not callable(generate):
            raise UsageError(f"{type(self.module).__name__} has no generate(): call the engine as the model")
        if self.ranks.shards > 1 and "synced_gpus" in signature(generate).parameters:
            kwargs.setdefault("synced_gpus", True)
        return self._run(generate, *args, **kwargs)

    @breaks_graphs
    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        return call(*args, **kwargs)

    def train(self: _Engine, mode: bool = True) -> _Engine:
        """Put the model in training mode, or in evaluation mode if `mode` is false. Return the engine."""
        self.module.train(mode)
        return self

    def eval(self: _Engine) -> _Engine:
        """Put the model in evaluation mode. Return the engine."""
        return self.train(False)

    def ignore_moves(self) -> None:
        """Leave parameters in their tiers, without an error, when a script moves the model to another device."""
        self._hooks.ignore_moves()

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; move batches there."""
        return self.parts.device.torch_device

    @property
    def ranks(self) -> Communicator:
        """The data-parallel ranks: `ranks.rank` and `ranks.size`."""
        return self.parts.ranks

    @property
    def units(self) -> list[Unit]:
        """The model's units, in the order of its modules."""
        return self.parts.units

    def describe(self) -> str:
        """Return a table of units, with the tier and bytes of each state, and this rank's bytes in each tier.

        "-" stands for states that a frozen unit lacks, and "on arrival" for gradients that the update consumes during
        backward instead of storing them.
        """
        return describe(self.parts.plan)

    # -- values ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Execute pending updates and wait until every state is in its tier.

        Raises UsageError if modules of the model hold other tensors in place of their parameters.
        """
        self._check_open()
        self._hooks.check_replaced()
        self.parts.runner.edits.check_held_back()
        with self.failing():
            self.parts.store.release_all()

    def begin_together(self, call: Operation) -> None:
        """Wait until all ranks have begun `call`. Raises RanksError on all ranks if one does something else."""
        self._check_open()
        self.ranks.begin(Announcement(call))

    def settle_between_steps(self, what: str, call: Operation) -> None:
        """Call `settle` once all ranks have begun `call`.

        Raises UsageError between backward and step, since `what` does not include gradients.
        """
        self._check_between_steps(what)
        self.begin_together(call)
        self.settle()

    def _check_between_steps(self, what: str) -> None:  # noqa: B027 - inference has no steps
        """Raise UsageError between backward and step. what: first words of the error's text."""

    def open_stream(self, end: Callable[[], None]) -> None:
        """Call `end` at the beginning of the engine's next call, which ends a stream of weights."""
        self._end_stream = end

    def load_with(self, load: Callable[[nn.Module], object]) -> None:
        """Call `load` with the model, whose parameters it may edit, also by `load_state_dict`. Collective.

        All ranks must make the same edits. The fp32 masters of elements whose 16-bit value changes get that value.
        """
        self.begin_together(Operation.LOAD_PARAMETERS)
        self.settle()
        with self._hooks.loading():
            load(self.module)

    def stream_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value) of every parameter and persistent buffer, one unit at a time. Collective.

        Names are the keys of the model's `state_dict()`. Values are unsharded on every rank, in host memory, in the
        dtype that the model computes in. Tiles of a layer are yielded as one tensor, inner tensors of a tensor subclass
        as one of that class, and a quantised layer of bitsandbytes as its own `state_dict` shows it.
        """
        self.begin_together(Operation.READ_STATE_DICT)
        self.settle()
        pieces, assembly = Pieces(self.module), Assembly()
        found: dict[int, list[Piece]] = {}
        wrappers = Wrappers(self.module)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(pieces.of(own_name(name), parameter))
        shown, done = set[str](), set[int]()
        for path, layer in bitsandbytes.quantised(self.module):
            values = self._shown(f"{path}.", layer)
            shown |= values.keys()
            for identity in (id(each.tensor) for each in stored_in(layer) if values):
                # Another module that shares a tensor of the layer has a name of its own for it.
                found[identity] = [piece for piece in found.get(identity, []) if piece.name not in shown]
                done |= set() if found[identity] else {identity}
            yield from values.items()
        for unit in self.units:
            if all(id(parameter) in done for parameter in unit.parameters):
                continue
            self._check_open()
            flat = self.parts.states.read_param(unit.layout)
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                local = flat[slot.offset : slot.stop].view(slot.shape).clone()
                value = self.ranks.model.whole(parameter, local)
                if id(parameter) in done:
                    continue
                if parameter in wrappers:
                    yield from wrappers.add(parameter, value)
                else:
                    yield from assembly.add(found.get(id(parameter), [Piece(slot.name, slot.shape)]), value)
        aliases = aliases_of_buffers(self.module)
        for name, buffer in persistent_buffers(self.module).items():
            value = buffer.detach().cpu().clone()
            names = (name, *(alias for alias, first in aliases.items() if first == name))
            yield from ((each, value) for each in names if each not in shown)

    def _shown(self, prefix: str, layer: nn.Module) -> dict[str, torch.Tensor]:
        """Return what a quantised layer writes into a state_dict, under names that begin with `prefix`; empty if its
        class cannot, as bitsandbytes' embeddings.
        """
        shown: dict[str, torch.Tensor] = {}
        with ExitStack() as held:
            units = {self.parts.unit_of[id(each.tensor)] for each in stored_in(layer)}
            for unit in sorted(units, key=lambda unit: unit.index):
                self.parts.runner.hold(unit)
                held.callback(self.parts.runner.unhold, unit)
            try:
                layer._save_to_state_dict(shown, prefix, keep_vars=False)
            except NotImplementedError:
                return {}
            return {name: value.detach().to("cpu", copy=True) for name, value in shown.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return `stream_state_dict()` as a dict. Needs host memory for the whole model on every rank."""
        return dict(self.stream_state_dict())

    def is_frozen(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter of the model is not trained by the script."""
        return not parameter.requires_grad

    def left_out(self, exclude_frozen: bool) -> Callable[[nn.Parameter], bool]:
        """Return a function that returns True for parameters which a file of the model omits."""
        return self.is_frozen if exclude_frozen else lambda parameter: False

    def _progress(self) -> Progress:
        """Return the progress that a checkpoint saves."""
        return Progress(self.global_steps, self.skipped_steps, [], None, None)

    # -- shutdown ----------------------------------------------------------------------------------------------------

    def close(self, *, restore: bool = False) -> None:
        """Finish pending work, remove hooks, release threads, memory and disk. Idempotent; any thread may call it.

        The model keeps its parameters' values if they are unsharded in this rank's memory (`offload_param.device` none
        or cpu; one rank or a stage below 3) and a copy fits on the device or in host memory. Otherwise any use of a
        parameter raises UsageError.

        restore: return all values to the model; the call is collective then. Raises OutOfMemoryError if they do not
        fit, after everything is released. Raises UsageError if an earlier `close` discarded them.
        """
        if os.getpid() != self._process:  # a forked child has nothing to release
            return
        if self._closed:
            if restore and any(map(is_released, self.module.parameters())):
                raise UsageError(
                    "engine.close(restore=True) was called on an engine that is closed already, and the parameters' "
                    "values are gone. Load a checkpoint into a new engine, and close that with restore=True."
                )
            return
        self._closed = True
        self._end_stream()
        open_engines.discard(self)
        self._hooks.remove()
        healthy = not self._broken and self.parts.store.moves.failure is None and not self.parts.ranks.error
        try:
            if healthy:
                self._finish()
                self.parts.store.release_all()
                restored = restoring(self.parts, everything=restore)
        finally:
            self.parts.store.abandon()
            if self._finalizer.detach() is not None:
                self._end()
            self.parts.ranks.close()
        # A graph of before refers to states in memory, and its backward may still come.
        if not any(unit.references for unit in self.parts.units):
            self.parts.free_memory()
        if healthy:
            restored()
            bitsandbytes.restore(self.module)

    def _finish(self) -> None:  # noqa: B027 - inference changes nothing
        """Execute pending updates, so that all units can be released."""

    def __enter__(self: _Engine) -> _Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Stop the engine on errors in the block that leave states inconsistent (I/O, commits, Ctrl-C, other ranks)."""
        try:
            yield
        except (OSError, ForcedInterrupt, RanksError, StorageError, UpdateError) as error:
            self._broken = str(error)
            raise

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[None]:
        """Stop the engine if the block, which loads states from `path`, ends early: some may be replaced then."""
        try:
            yield
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self._broken = f"a load of {path} failed when some states had been replaced: {reason}"
            raise

    @eager
    def _check_open(self) -> None:
        """Raise UsageError or RanksError if the engine cannot be used. Every call of the engine begins with it."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this engine belongs to process {self._process}, whose memory and threads do not exist in this forked "
                f"child ({os.getpid()}): construct the engine in the process that uses it"
            )
        if self._closed:
            raise UsageError(f"the engine is closed: make a new one with {self._maker}")
        self._broken = self._broken or str(self.parts.store.moves.failure or "")
        if self._broken:
            raise UsageError(f"the engine stopped ({self._broken}): {self._remedy}")
        if self.parts.ranks.error:  # set by the thread of collectives, which has no caller to raise it
            self._broken = self.parts.ranks.error
            raise RanksError(self._broken)
        end, self._end_stream = self._end_stream, _nothing
        end()


def _nothing() -> None:
    return None

"""Training loops as users write them, the same for plain PyTorch and for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from fuzz.case import Case
from fuzz.events import happen
from fuzz.model import Batch, Net
from fuzz.parts import WIDTH, Context, Deliberate
from fuzz.trainers import Trainer


class Run:
    """One training of a case by `trainer`. values: every number that the loop read, such as losses, in order."""

    def __init__(self, case: Case, trainer: Trainer) -> None:
        self.case, self.loop, self.trainer = case, case.loop, trainer
        self.model: Net = trainer.model
        self.kept = trainer.keep(self.loop.kept)
        self.values: list[tuple[str, float]] = []
        self.undo: list[Callable[[], None]] = []
        """Functions to call after the next backward."""
        self.step = 0
        self.skip_step = False
        names = [(n, p) for n, p in self.model.named_parameters() if p.dtype == self.model.dtype and p.numel()]
        self.names = [name for name, _ in names]
        self.trained = [name for name, p in names if p.requires_grad]
        self.frozen = [name for name, p in names if not p.requires_grad]
        self.scheduler: LambdaLR | None = None
        if self.loop.schedule == "lambda":
            self.scheduler = LambdaLR(trainer.optimizer, lambda step: 1.0 / (1 + step))

    def note(self, what: str, value: Any) -> None:
        self.values.append((f"step {self.step}: {what}", float(value)))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        if self.loop.thread == "one":
            in_thread(self._train)
        else:
            self._train()

    def _train(self) -> None:
        for step in range(self.loop.steps):
            self.step = step
            if self.loop.thread == "each step":
                in_thread(self._one_step)
            else:
                self._one_step()

    def _one_step(self) -> None:
        self._happen("before")
        raises = next((e.kind for e in self.loop.events if e.step == self.step and e.kind.startswith("raise in")), "")
        if raises and raises != "raise in evaluation":
            try:
                self._micro_batches(raises.removeprefix("raise in "))
                return self._after()
            except Deliberate:  # as users' loops do: drop the gradients and repeat the step
                self.trainer.drop()
                self.undo.clear()
        self._micro_batches("")
        self._after()

    def _micro_batches(self, raises: str) -> None:
        micro_batches = 1 if self.loop.backward == "twice uncounted" else self.loop.accumulation
        self.skip_step = False
        for micro in range(micro_batches):
            number = 10 * self.step + micro
            torch.default_generator.manual_seed(number)
            loss = self.loss(Batch(self.case, number), raises)
            self.note(f"loss of micro-batch {micro}", loss.detach())
            apart = self.loop.unsynced and micro < micro_batches - 1
            with self.trainer.no_sync() if apart else nullcontext():
                self.backward(loss)
            del loss
            while self.undo:
                self.undo.pop()()
            if micro == micro_batches - 1:
                self._happen("between")
            if not self.skip_step:
                self.trainer.step()

    def _after(self) -> None:
        if self.scheduler is not None and not self.skip_step:
            self.scheduler.step()
        if self.loop.schedule == "by hand":
            for group in self.trainer.optimizer.param_groups:
                group["lr"] *= 0.7
        self._happen("after")

    def _happen(self, place: str) -> None:
        for event in self.loop.events:
            if (event.step, event.place) == (self.step, place):
                if self.loop.thread == "evaluation" and event.kind.startswith("evaluate"):
                    in_thread(lambda event=event: happen(self, event))  # type: ignore[misc]
                else:
                    happen(self, event)

    def resume(self) -> None:
        """Go on from a checkpoint."""
        self.trainer.resume()
        self.model = self.trainer.model
        self.kept = self.trainer.keep(self.loop.kept)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, raises: str = "", x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss, calling the model in the loop's way."""
        context = Context(batch.tokens, self.step)
        context.raises = raises
        x = batch.x if x is None else x
        call = self.loop.call
        # Without its cache, which would return casts of before an edit; an engine disables it too.
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if self.loop.autocast else nullcontext()
        with autocast:
            if call == "module":
                return self.model(x, batch.target, context)
            if call == "parts":
                x = self.model.begin(x)
                for part in self.model.parts:
                    x = part(x, context)
                return self.model.end(x, batch.target)
            if call == "functional":
                args = (x, batch.target, context)
                return torch.func.functional_call(self.model, dict(self.model.named_parameters()), args)
            if call == "checkpointed":
                x = x if x.requires_grad else x.clone().requires_grad_()
                reentrant = self.case.seed % 2 == 0
                return checkpoint(self.trainer.forward, x, batch.target, context, use_reentrant=reentrant)
            loss = self.trainer.forward(x, batch.target, context)
            if call == "two forwards":
                loss = loss + self.trainer.forward(x.flip(0), batch.target, Context(batch.tokens, self.step))
            return loss

    def loss(self, batch: Batch, raises: str) -> torch.Tensor:
        penalty = PENALTIES.get(self.loop.penalty)
        if self.loop.kept == "from first forward" and not self.kept:
            loss = self.forward(batch, raises)
            self.kept.extend(self.model.get_parameter(name) for name in self.names)
        elif self.loop.penalty == "input gradient":
            x = batch.x.clone().requires_grad_()
            loss = self.forward(batch, raises, x)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.square().sum()
        else:
            loss = self.forward(batch, raises)
        return loss if penalty is None else penalty(self, loss, batch)

    def usable(self) -> list[torch.Tensor]:
        """A few of the tensors that were kept."""
        return [kept for kept in self.kept if kept.dtype == self.model.dtype and kept.numel()][:6]

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        kind, trainer = self.loop.backward, self.trainer
        if kind == "engine":
            trainer.backward(loss)
        elif kind == "autograd":
            torch.autograd.backward([trainer.scale(loss)])
        elif kind == "tensor":
            trainer.scale(loss).backward()  # type: ignore[no-untyped-call]
        elif kind == "two losses":
            trainer.scale(loss.square()).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            trainer.scale(loss).backward()  # type: ignore[no-untyped-call]
        else:
            trainer.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            trainer.scale(0.5 * loss).backward()  # type: ignore[no-untyped-call]


def in_thread(call: Callable[[], None]) -> None:
    """Run `call()` in a new thread and raise its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="user")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# -- what is added to the loss, by the loop's own code ---------------------------------------------------------------


def _attribute_l2(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss + 0.01 * sum(run.model.get_parameter(name).square().sum() for name in run.trained[:5])


def _attribute_view(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss + 0.01 * sum(run.model.get_parameter(name).view(-1)[0] for name in run.names)


def _kept_l2(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss + 0.01 * sum(kept.square().sum() for kept in run.usable())


def _kept_norm(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss + 0.01 * sum((kept + 0.1).norm() for kept in run.usable())


def _kept_pair(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Two weights tied by hand."""
    square = [kept for kept in run.kept if kept.numel() == WIDTH * WIDTH and kept.dtype == run.model.dtype]
    return loss + 0.01 * (square[0] - square[-1]).square().sum()


def _kept_detached(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss * (1.0 + 0.01 * sum(kept.detach().abs().mean() for kept in run.usable()))


def _weight_gradient(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    wanted = run.model.get_parameter("inputs.weight")
    if not wanted.requires_grad:
        return loss
    (gradient,) = torch.autograd.grad(loss, wanted, create_graph=True)
    return loss + gradient.square().sum()


def _kept_gradient(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    wanted = [kept for kept in run.usable() if kept.requires_grad]
    if not wanted:
        return loss
    gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    return loss + sum(g.square().sum() for g in gradients if g is not None)


def _sharpness(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sharpness-aware minimisation: the loss at weights moved along its gradient, moved back after backward."""
    wanted = run.model.get_parameter("inputs.weight")
    if not wanted.requires_grad:
        return loss
    (gradient,) = torch.autograd.grad(loss, wanted)
    step = 0.05 * gradient
    with torch.no_grad():
        run.model.inputs.weight.add_(step)

    def back() -> None:
        with torch.no_grad():
            run.model.inputs.weight.sub_(step)

    run.undo.append(back)
    return run.forward(batch)


def _maml(run: Run, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    names = [name for name in run.trained if run.model.get_parameter(name).requires_grad][:4]
    wanted: list[nn.Parameter] = [run.model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, wanted, gradients, strict=True) if g is not None}
    args = (batch.x, batch.target, Context(batch.tokens, run.step))
    out: torch.Tensor = torch.func.functional_call(run.model, fast, args)
    return out


PENALTIES: dict[str, Callable[[Run, torch.Tensor, Batch], torch.Tensor]] = {
    "attribute l2": _attribute_l2,
    "attribute view": _attribute_view,
    "kept l2": _kept_l2,
    "kept norm": _kept_norm,
    "kept pair": _kept_pair,
    "kept detached": _kept_detached,
    "weight gradient": _weight_gradient,
    "kept gradient": _kept_gradient,
    "sharpness": _sharpness,
    "maml": _maml,
}

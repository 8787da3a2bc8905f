"""Events between the steps of a loop, and between backward and step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuzz.case import Event
from fuzz.edits import edit
from fuzz.model import Batch
from fuzz.parts import Context, Deliberate

if TYPE_CHECKING:
    from fuzz.loops import Run

EDIT_DATA = ("data mul", "data clamp", "data slice", "data copy", "detach", "detach set")
EDIT_NO_GRAD = ("no_grad", "foreach", "out", "renorm")


def happen(run: Run, event: Event) -> None:
    """Carry out one event. Numbers that it reads are added to the run's values."""
    _EVENTS[event.kind](run, event.target)


def _parameter(run: Run, target: int) -> nn.Parameter:
    """Return a parameter, read as an attribute of its module."""
    return run.model.get_parameter(run.names[target % len(run.names)])


def _kept(run: Run, target: int) -> torch.Tensor | None:
    usable = run.usable()
    return usable[target % len(usable)] if usable else None


def _args(run: Run, number: int, raises: str = "") -> tuple[Any, ...]:
    batch = Batch(run.case, number)
    context = Context(batch.tokens, run.step)
    context.raises = raises
    return batch.x, batch.target, context


def _evaluate(run: Run, target: int, *, inference: bool = False) -> None:
    run.model.eval() if target % 3 else None
    with torch.inference_mode() if inference else torch.no_grad():
        call = run.trainer.forward if target % 2 else run.model
        run.note("evaluation", call(*_args(run, 500 + target)))
    run.model.train()


def _evaluate_with_gradients(run: Run, target: int) -> None:
    run.note("loss without a backward", run.trainer.forward(*_args(run, 600)).detach())


def _generate(run: Run, target: int) -> None:
    run.model.eval()
    with torch.no_grad():
        x, goal, context = _args(run, 700)
        for _ in range(3):
            loss = run.trainer.forward(x, goal, context)
            x = x * loss
        run.note("generated", loss)
    run.model.train()


def _raise_in_evaluation(run: Run, target: int) -> None:
    try:
        with torch.no_grad():
            run.note("evaluation that may raise", run.trainer.forward(*_args(run, 800, "forward")))
    except Deliberate:
        run.note("evaluation raised", 1)


def _read(run: Run, target: int) -> None:
    run.note("parameter", _parameter(run, target).detach().double().sum())


def _read_kept(run: Run, target: int) -> None:
    kept = _kept(run, target)
    if kept is not None:
        run.note("what was kept", kept.detach().double().sum())


def _read_state_dict(run: Run, target: int) -> None:
    for name, value in run.model.state_dict().items():
        if value.is_floating_point():
            run.note(f"state_dict {name}", value.double().sum())


def _read_master(run: Run, target: int) -> None:
    run.note("master", run.trainer.master(_parameter(run, target)).double().sum())


def _edit_no_grad(run: Run, target: int) -> None:
    edit(_parameter(run, target), EDIT_NO_GRAD[target % len(EDIT_NO_GRAD)])


def _edit_kept(run: Run, target: int) -> None:
    kept = _kept(run, target)
    if kept is not None:
        with torch.no_grad():
            kept.mul_(0.9)


def _edit_kept_view(run: Run, target: int) -> None:
    kept = _kept(run, target)
    if kept is not None:
        kept.data.mul_(0.9)


def _apply(run: Run, target: int) -> None:
    def clip(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.clamp_(-0.4, 0.4)

    run.model.apply(clip)


def _vector(run: Run, target: int) -> None:
    chosen = [run.model.get_parameter(name) for name in run.names[target % len(run.names) :][:3]]
    vector = nn.utils.parameters_to_vector(chosen).detach() * 0.95
    nn.utils.vector_to_parameters(vector, chosen)


def _freeze(run: Run, target: int) -> None:
    if len(run.trained) > 2:
        run.model.get_parameter(run.trained[target % len(run.trained)]).requires_grad_(False)


def _unfreeze(run: Run, target: int) -> None:
    names = run.frozen or run.trained
    run.model.get_parameter(names[target % len(names)]).requires_grad_(True)


def _freeze_for_a_backward(run: Run, target: int) -> None:
    part = run.model.parts[target % len(run.model.parts)]
    changed = [p for p in part.parameters() if p.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)

    def back() -> None:
        for parameter in changed:
            parameter.requires_grad_(True)

    run.undo.append(back)


def _drop(run: Run, target: int) -> None:
    run.trainer.drop()
    run.skip_step = True


def _average(run: Run, target: int) -> None:
    """Update a moving average of the kept tensors, as an EMA of weights outside the model does."""
    mean = [0.9 * kept.detach().double() for kept in run.usable()]
    run.note("average", sum(float(each.sum()) for each in mean))


def _register_hook(run: Run, target: int) -> None:
    parameter = _parameter(run, target)
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: 0.5 * gradient)


def _eval_for_a_step(run: Run, target: int) -> None:
    run.model.eval()
    run.undo.append(lambda: run.model.train() and None)


def _functional(run: Run, target: int) -> None:
    named = {name: 0.9 * run.model.get_parameter(name) for name in run.names}
    with torch.no_grad():
        run.note("functional", torch.func.functional_call(run.model, named, _args(run, 900)))


def _copy(run: Run, target: int) -> None:
    if target % 4:
        run.note(
            "copied parameters", sum(float(copy.deepcopy(p).double().sum()) for p in run.model.inputs.parameters())
        )
        return
    with torch.no_grad():
        run.note("copied part", copy.deepcopy(run.model.inputs)(_args(run, 900)[0]).double().sum())


def _grad_by_hand(run: Run, target: int) -> None:
    wanted = run.model.get_parameter(run.trained[target % len(run.trained)])
    if not wanted.requires_grad:
        return
    loss = run.trainer.forward(*_args(run, 950))
    (gradient,) = torch.autograd.grad(loss, wanted, allow_unused=True)
    if gradient is not None:
        run.note("gradient", gradient.double().norm() + 1)


def _set_lr(run: Run, target: int) -> None:
    for group in run.trainer.optimizer.param_groups:
        group["lr"] *= 0.5


def _gathered(run: Run, target: int) -> None:
    chosen = [run.model.get_parameter(name) for name in run.names[target % len(run.names) :][:3]]
    with run.trainer.gathered(chosen), torch.no_grad():
        for parameter in chosen:
            run.note("gathered", parameter.double().sum())
            parameter.mul_(0.97)


def _by_hand(run: Run, target: int) -> None:
    """Read, clip, set or clear `.grad` between backward and step, as users' loops do."""
    parameters = list(run.model.parameters())
    how = target % 6
    if how == 0:
        nn.utils.clip_grad_norm_(parameters, 0.05)
    elif how == 1:
        nn.utils.clip_grad_value_(parameters, 0.001)
    elif how == 2:
        run.model.zero_grad()
    elif how == 3:
        for parameter in parameters:
            parameter.grad = None
    elif how == 4:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    else:
        run.note("gradients", sum(float(p.grad.norm()) for p in parameters if p.grad is not None))


def _nothing(run: Run, target: int) -> None:
    """Do nothing: the loop itself carries out this event."""


_EVENTS: dict[str, Callable[[Run, int], None]] = {
    "evaluate": _evaluate,
    "evaluate in inference mode": lambda run, target: _evaluate(run, target, inference=True),
    "evaluate with gradients": _evaluate_with_gradients,
    "read": _read,
    "read kept": _read_kept,
    "read state_dict": _read_state_dict,
    "read master": _read_master,
    "generate": _generate,
    "edit data": lambda run, target: edit(_parameter(run, target), EDIT_DATA[target % len(EDIT_DATA)]),
    "edit numpy": lambda run, target: edit(_parameter(run, target), "numpy"),
    "edit no_grad": _edit_no_grad,
    "edit kept": _edit_kept,
    "edit kept view": _edit_kept_view,
    "assign data": lambda run, target: edit(_parameter(run, target), ("assign", "assign view")[target % 2]),
    "apply": _apply,
    "vector": _vector,
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "freeze for a backward": _freeze_for_a_backward,
    "raise in forward": _nothing,
    "raise in pre-hook": _nothing,
    "raise in backward": _nothing,
    "raise in evaluation": _raise_in_evaluation,
    "drop": _drop,
    "average": _average,
    "register hook": _register_hook,
    "train and eval": _eval_for_a_step,
    "functional": _functional,
    "copy": _copy,
    "grad by hand": _grad_by_hand,
    "set lr": _set_lr,
    "save and load": lambda run, target: run.resume(),
    "gathered": _gathered,
    "by hand": _by_hand,
}

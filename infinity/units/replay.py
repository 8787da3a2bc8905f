"""Whether the rules of a model on the meta device give what the model's own code would have given.

A tensor on the meta device has no values, but it counts the edits in place that were made to it (`_version`), those of
`torch.nn.init` too. The rules are replayed on stand-ins: a parameter that was made by its module's constructor and its
rules, and by nothing else, was edited as often. [Note: construction on the meta device, docs/design.md]
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.rules import Rule, Rules, reset

FIX = (
    "Build the model on the cpu; where it does not fit in memory, under infinity.Init, in which from_pretrained and "
    "adapters work as ever. Or load the values with infinity.load_pretrained."
)


def check_reproducible(model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> None:
    """ModelError that names the first parameter of `drawn` whose rules are not known to reproduce it.

    drawn: parameters on the meta device that rules are to initialise, and their names.
    """
    if not drawn:
        return
    replay, twins = Replay(model, rules, drawn), Twins(model)
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    for parameter, name in drawn.items():
        owner = replay.owner[parameter]
        problem = twins.problem(parameter)
        if problem is None and not twins.vouch_for(parameter):
            problem = replay.problem(parameter)
            if problem is None and frozen and parameter.requires_grad and not twins.know(parameter):
                problem = replay.doubt(parameter)
        if problem:
            raise ModelError(f"parameter {name} ({type(owner).__name__}) is on the meta device and {problem}. {FIX}")


def name_of(rule: Rule) -> str:
    """As error messages call it."""
    if rule is reset:
        return "reset_parameters()"
    owner = getattr(rule, "__self__", None)
    return f"{type(owner).__name__}.{getattr(rule, '__name__', 'its rule')}()"


class Replay:
    """How often constructors and rules edit each parameter of a model."""

    def __init__(self, model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> None:
        self.owner: dict[nn.Parameter, nn.Module] = {}
        """The first module to hold it."""
        self._built: Counter[nn.Parameter] = Counter()
        """Edits by `reset_parameters`, as constructors call it."""
        self._ruled: Counter[nn.Parameter] = Counter()
        """Edits by the rules that are no `reset_parameters`, where each is applied once."""
        self._ruled_all: Counter[nn.Parameter] = Counter()
        """The same where modules that share a parameter are all visited."""
        self.reached: dict[nn.Parameter, list[nn.Module]] = {}
        """Parameters → the modules around theirs whose rules edit them too, inner ones first."""
        self._rules = rules
        self._paths = {module: path for path, module in model.named_modules()}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owner.setdefault(parameter, module)
        # With random numbers of its own, which the caller does not miss.
        with stand_ins(model.modules()) as made, torch.random.fork_rng(devices=[]):
            self._visit(model, set(), {made[parameter]: parameter for parameter in drawn})

    def _visit(self, module: nn.Module, seen: set[nn.Module], drawn: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Children before parents, as `Module.apply` goes."""
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            self._visit(child, seen, drawn)
        inside = [(p, drawn[p]) for p in module.parameters() if p in drawn]
        if not inside:
            return
        own = {id(p) for p in module.parameters(recurse=False)}
        rule = self._rules.of(module)
        for each in (reset, rule) if rule is not reset else (reset,):
            before = [p._version for p, _ in inside]
            try:
                each(module)
            except Exception as error:
                raise ModelError(
                    f"{name_of(each)} fails for {self._paths[module] or 'the model'} ({type(module).__name__}), which "
                    f"is on the meta device ({type(error).__name__}: {error}). {FIX}"
                ) from error
            for (stand_in, parameter), version in zip(inside, before, strict=True):
                edits = stand_in._version - version
                first = self.owner[parameter] is module or id(stand_in) not in own
                if edits and id(stand_in) not in own:
                    self.reached.setdefault(parameter, []).append(module)
                if each is reset:
                    self._built[parameter] += edits * first
                else:
                    self._ruled[parameter] += edits * first
                    self._ruled_all[parameter] += edits

    def problem(self, parameter: nn.Parameter) -> str | None:
        """What happened to the parameter besides."""
        built, owner = self._built[parameter], self.owner[parameter]
        ruled = {self._ruled[parameter], self._ruled_all[parameter]} if self._applied(owner) else {0}
        expected = {built + edits for edits in ruled}
        if not _resets_as_torch(owner):
            # A rule that the user wrote may stand for values that a constructor makes out of place (torch.ones).
            expected |= {0, self._ruled[parameter]}
        if parameter._version in expected:
            return None
        return (
            f"was edited {parameter._version} times in place, and {max(expected)} times by its constructor and "
            f"{name_of(self._rules.of(owner))}: initialising it anew would not give what the model's own code gave it"
        )

    def doubt(self, parameter: nn.Parameter) -> str | None:
        """A module that was added has as many edits as a rule makes, if it was edited that often for itself."""
        owner = self.owner[parameter]
        if not (self._ruled[parameter] and self._applied(owner)):
            return None
        return (
            f"is trained beside frozen ones, and {name_of(self._rules.of(owner))} would initialise it anew: the values "
            "of an adapter that was added to the model would be lost"
        )

    def _applied(self, owner: nn.Module) -> bool:
        """Whether the model's rule, if it is no `reset_parameters`, has been applied to the module already.

        transformers marks the modules that it was applied to, and leaves those on the meta device out since 5.21.
        """
        holder = getattr(self._rules.of(owner), "__self__", None)
        return not of_transformers(holder) or bool(getattr(owner, "_is_hf_initialized", False))


def _resets_as_torch(module: nn.Module) -> bool:
    """Whether its `reset_parameters` is torch's, which its constructor calls."""
    own = getattr(type(module), "reset_parameters", None)
    return callable(own) and str(inspect.unwrap(own).__module__).startswith("torch.")


@contextmanager
def stand_ins(
    modules: Iterable[nn.Module], keep: nn.Parameter | None = None
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """In the block, parameters and buffers of `modules` are others on the meta device, which were never edited.

    keep: a parameter that stays. Parameters that are shared stay shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    try:
        for module, parameters, buffers in held:
            for name, parameter in parameters.items():
                if parameter is None or parameter is keep:
                    continue
                if parameter not in made:
                    value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    made[parameter] = nn.Parameter(value, parameter.requires_grad)
                module._parameters[name] = made[parameter]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        yield made
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


class Twins:
    """Models of transformers, which their config builds once more: what a twin lacks was added, what was edited more
    often was edited after construction.
    """

    def __init__(self, model: nn.Module) -> None:
        self._problems: dict[nn.Parameter, str] = {}
        self._known: set[nn.Parameter] = set()
        self._vouched: set[nn.Parameter] = set()
        self._visit(model, set())

    def problem(self, parameter: nn.Parameter) -> str | None:
        return self._problems.get(parameter)

    def know(self, parameter: nn.Parameter) -> bool:
        """Whether a twin has it as it is."""
        return parameter in self._known

    def vouch_for(self, parameter: nn.Parameter) -> bool:
        """Whether the library built all around it, whose `_init_weights` gives what its constructors give."""
        return parameter in self._vouched

    def _visit(self, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if not of_transformers(module) or (twin := _twin(module)) is None:
            for child in module.children():
                self._visit(child, seen)
            return
        others = dict(twin.named_parameters(remove_duplicate=False))
        modules = dict(twin.named_modules(remove_duplicate=False))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            other, path = others.get(name), name.rpartition(".")[0]
            if other is None or other.shape != parameter.shape or not _alike(module.get_submodule(path), modules[path]):
                self._problems[parameter] = (
                    f"is no part of the {type(module).__name__} that its config describes: it was added or moved, "
                    "and initialising it anew would not give what it was made with"
                )
            elif other._version != parameter._version:
                self._problems[parameter] = (
                    f"was edited after {type(module).__name__} was constructed ({parameter._version} edits instead of "
                    f"{other._version}): initialising it anew would lose that"
                )
            else:
                self._known.add(parameter)
        if all(type(each).__module__.startswith(("transformers.", "torch.")) for each in module.modules()):
            self._vouched |= self._known


def _alike(module: nn.Module, other: nn.Module) -> bool:
    """The same class (by name: a parametrization makes one for each module), and transformers' mark or none."""
    classes = [(type(each).__module__, type(each).__qualname__) for each in (module, other)]
    marks = [bool(getattr(each, "_is_hf_initialized", False)) for each in (module, other)]
    return classes[0] == classes[1] and marks[0] == marks[1]


def of_transformers(module: object) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def _twin(module: nn.Module) -> nn.Module | None:
    """The same model once more, on the meta device; None where its config does not make one."""
    maker: Any = type(module)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            twin = maker(copy.deepcopy(module.config))
    except Exception:  # noqa: BLE001 - runs the model's code, whose constructor may take other arguments
        return None
    return twin if isinstance(twin, nn.Module) else None

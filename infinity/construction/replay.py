"""Checks that initialisation rules reproduce the values that the model's own code would have produced.

A tensor on the meta device has no values, but it counts its in-place edits (`_version`), including those by
`torch.nn.init`. The rules are replayed on stand-ins. A parameter that only its constructor and its rules have edited
has the same count as its stand-in. [Note: construction on the meta device]
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

from infinity.construction.initialize import Rule, Rules, reset
from infinity.errors import ModelError

FIX = (
    "Build the model on the cpu; where it does not fit in memory, under infinity.Init, in which from_pretrained and "
    "adapters work unchanged. Or load the values with infinity.load_pretrained."
)


def check_reproducible(model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> None:
    """Raise ModelError that names the first parameter of `drawn` which its rules may not reproduce.

    drawn: parameters on the meta device that rules will initialise → their names.
    """
    if not drawn:
        return
    replay, twins = Replay(model, rules, drawn), Twins(model)
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    for parameter, name in drawn.items():
        owner = replay.owner[parameter]
        problem = twins.problems.get(parameter)
        if problem is None and parameter not in twins.vouched:
            problem = replay.problem(parameter)
            if problem is None and frozen and parameter.requires_grad and parameter not in twins.known:
                problem = replay.doubt(parameter)
        if problem:
            raise ModelError(f"parameter {name} ({type(owner).__name__}) is on the meta device and {problem}. {FIX}")


def name_of(rule: Rule) -> str:
    """Return the name of a rule for error messages."""
    if rule is reset:
        return "reset_parameters()"
    owner = getattr(rule, "__self__", None)
    return f"{type(owner).__name__}.{getattr(rule, '__name__', 'its rule')}()"


def owners(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """Return parameter → the first module that holds it."""
    return {p: module for module in reversed([*model.modules()]) for p in module.parameters(recurse=False)}


class Replay:
    """Counts the in-place edits of each parameter by constructors and rules."""

    def __init__(self, model: nn.Module, rules: Rules, drawn: Mapping[nn.Parameter, str]) -> None:
        self.owner = owners(model)
        self._built: Counter[nn.Parameter] = Counter()
        """Edits by `reset_parameters()`, which constructors call."""
        self._ruled: Counter[nn.Parameter] = Counter()
        """Edits by the model's rules (not `reset_parameters`), counted once if modules share the parameter."""
        self._ruled_all: Counter[nn.Parameter] = Counter()
        """The same edits, counted for each module that shares the parameter."""
        self.reached: dict[nn.Parameter, list[nn.Module]] = {}
        """parameter → enclosing modules whose rules edit it too, innermost first."""
        self._rules = rules
        self._paths = {module: path for path, module in model.named_modules()}
        # Forked: rules draw random numbers, and the caller's generator must not advance.
        with stand_ins(model.modules()) as made, torch.random.fork_rng(devices=[]):
            self._visit(model, set(), {made[parameter]: parameter for parameter in drawn})

    def _visit(self, module: nn.Module, seen: set[nn.Module], drawn: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replay the rules of `module` and of all below it, children before parents as in `Module.apply`."""
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            self._visit(child, seen, drawn)
        inside = [(p, drawn[p]) for p in module.parameters() if p in drawn]
        if not inside:
            return
        own = {id(p) for p in module.parameters(recurse=False)}
        rule = self._rules[module]
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
        """Return the problem, for an error, if the parameter has other edits than rules make; None if it has not."""
        built, owner = self._built[parameter], self.owner[parameter]
        ruled = {self._ruled[parameter], self._ruled_all[parameter]} if self._applied(owner) else {0}
        expected = {built + edits for edits in ruled}
        if not _resets_as_torch(owner):
            # The user's own reset_parameters() may match a constructor that makes values out of place (torch.ones).
            expected |= {0, self._ruled[parameter]}
        if parameter._version in expected:
            return None
        return (
            f"was edited {parameter._version} times in place, and {max(expected)} times by its constructor and "
            f"{name_of(self._rules[owner])}: reinitialising it would not reproduce the model's own values"
        )

    def doubt(self, parameter: nn.Parameter) -> str | None:
        """Return the problem if edit counts cannot distinguish an added module from the model's own; else None.

        An adapter's own code may happen to edit its parameters as often as the model's rule does.
        """
        owner = self.owner[parameter]
        if not (self._ruled[parameter] and self._applied(owner)):
            return None
        return (
            f"is trained beside frozen ones, and {name_of(self._rules[owner])} would reinitialise it: the values "
            "of an adapter that was added to the model would be lost"
        )

    def _applied(self, owner: nn.Module) -> bool:
        """True if the model's rule has been applied to the module already.

        transformers marks modules when it applies its rule, and skips modules on the meta device since 5.21. Other
        rules count as applied.
        """
        holder = getattr(self._rules[owner], "__self__", None)
        return not of_transformers(holder) or bool(getattr(owner, "_is_hf_initialized", False))


def _resets_as_torch(module: nn.Module) -> bool:
    """True if the `reset_parameters` of `module` is torch's own, which torch's constructors call."""
    own = getattr(type(module), "reset_parameters", None)
    return callable(own) and str(inspect.unwrap(own).__module__).startswith("torch.")


@contextmanager
def stand_ins(
    modules: Iterable[nn.Module], keep: nn.Parameter | None = None
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Replace parameters and buffers of `modules` in the block by fresh ones on the meta device, without edits.

    Yields parameter → its stand-in. Shared parameters share a stand-in. keep: a parameter that is not replaced.
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
    """Compares transformers models with twins, built a second time from their configs.

    A parameter that the twin lacks was added. A parameter with a different count of edits was edited after
    construction.
    """

    def __init__(self, model: nn.Module) -> None:
        self.problems: dict[nn.Parameter, str] = {}
        """parameter → its problem, for an error."""
        self.known: set[nn.Parameter] = set()
        """Parameters that a twin has with the same shape and as many edits."""
        self.vouched: set[nn.Parameter] = set()
        """Parameters whose whole model consists of modules of transformers, torch and tiles, whose `_init_weights` is
        trusted.
        """
        self._visit(model, set())

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
                self.problems[parameter] = (
                    f"is no part of the {type(module).__name__} that its config describes: it was added or moved, "
                    "and reinitialising it would not reproduce its values"
                )
            elif other._version != parameter._version:
                self.problems[parameter] = (
                    f"was edited after {type(module).__name__} was constructed ({parameter._version} edits instead of "
                    f"{other._version}): reinitialising it would lose the edits"
                )
            else:
                self.known.add(parameter)
        trusted = ("transformers.", "torch.", "infinity.nn.")
        if all(type(each).__module__.startswith(trusted) for each in module.modules()):
            self.vouched |= self.known


def _alike(module: nn.Module, other: nn.Module) -> bool:
    """True if both have the same class name and transformers' mark, or neither has the mark.

    Classes are compared by name, since a parametrization makes a new class for each module.
    """
    classes = [(type(each).__module__, type(each).__qualname__) for each in (module, other)]
    marks = [bool(getattr(each, "_is_hf_initialized", False)) for each in (module, other)]
    return classes[0] == classes[1] and marks[0] == marks[1]


def of_transformers(module: object) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def _twin(module: nn.Module) -> nn.Module | None:
    """Build the model again from its config, on the meta device; None if its class cannot do so."""
    maker: Any = type(module)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            twin = maker(copy.deepcopy(module.config))
    except Exception:  # noqa: BLE001 - runs the model's code, whose constructor may take other arguments
        return None
    if not isinstance(twin, nn.Module):
        return None
    _tile_alike(twin, module)
    return twin


_TILED = ("infinity.nn.tiling", "infinity.nn.experts")


def _tile_alike(twin: nn.Module, model: nn.Module) -> None:
    """Replace the layers of `twin` by tiles where `infinity.nn.tile` has replaced those of `model`."""
    tiled: dict[nn.Module, nn.Module] = {}
    others = dict(twin.named_modules(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        # Not by class, since infinity.nn is above this room.
        counterpart = getattr(module, "counterpart", None) if type(module).__module__ in _TILED else None
        parent, _, name = path.rpartition(".")
        if counterpart is not None and path in others:
            layer = others[path]
            if layer not in tiled:
                tiled[layer] = counterpart(layer)
            others[parent]._modules[name] = tiled[layer]

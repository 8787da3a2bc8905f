"""Finds parameters added to a model after the construction of its engine, which would neither train nor save them.

torch calls global hooks whenever a parameter or a module is registered in any module. The hooks here only set a flag
for modules of the engine's model; the next forward then searches the model. Without changes a forward costs one
comparison.

Copies parameters in results of `state_dict()` and detects in-place edits, which would change a plain model.

Finds the path of attributes and items that leads to an object, for error messages.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from infinity.comm.dtensor import is_plain
from infinity.errors import UsageError


class Additions:
    """Watches the modules of `model` until it is closed or dropped."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {module: _held(module) for module in model.modules()}
        """module → name in it → parameter, for the parameters that the engine manages."""
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._changed = False
        watch = _Watch(self)
        handles = [register_module_parameter_registration_hook(watch), register_module_module_registration_hook(watch)]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def note(self, module: nn.Module) -> None:
        """Record a registration in `module`, which may belong to any model."""
        # torch calls the hook for every module of the process.
        if module in self._known:
            self._changed = True

    def check(self) -> None:
        """Raise UsageError for the first parameter that the engine does not manage, or saves under another name."""
        if not self._changed:
            return
        for path, module in self._model.named_modules(remove_duplicate=False):
            known = self._known.get(module, {})
            for name, parameter in _held(module).items():
                full = f"{path}.{name}" if path else name
                if known.get(name) is not parameter:
                    raise UsageError(
                        f"parameter {full} ({type(module).__name__}) was added to the model while an engine has it. "
                        "The engine would neither train nor save it. Close the engine with "
                        "engine.close(restore=True), which returns the values to the model, and make a new engine; or "
                        "remove the parameter to continue without it."
                    )
                if self._names.get(full, parameter) is not parameter:
                    raise self._exchanged(full, parameter)
        for module in self._model.modules():  # modules without parameters may get one later
            self._known.setdefault(module, {})
        self._changed = False

    def _exchanged(self, name: str, parameter: nn.Parameter) -> UsageError:
        other = next(each for each, known in self._names.items() if known is parameter)
        return UsageError(
            f"{name} of the model is now {other}, since a module was replaced by another while an engine has the "
            "model. The engine saves the former parameter under that name. Undo the replacement; or close the engine "
            "with engine.close(restore=True), change the model and make a new engine."
        )

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        self._finalizer()


class _Watch:
    """Hook that torch calls. Its weak reference allows an engine to be freed without `close`."""

    def __init__(self, additions: Additions) -> None:
        self._additions = weakref.ref(additions)

    def __call__(self, module: nn.Module, name: str, value: object) -> None:
        additions = self._additions()
        if additions is not None and value is not None:
            additions.note(module)


def _held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of `module` itself. `items()` fetches no unit, unlike reads of single names."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class _Copy(NamedTuple):
    """Copy of one parameter.

    counter: an empty tensor that shares the copy's version counter and outlives the copy. version: of the copy when it
    was made.
    """

    key: str
    tensor: weakref.ref[torch.Tensor]
    counter: torch.Tensor
    version: int

    @property
    def is_edited(self) -> bool:
        return self.counter._version != self.version


class StateCopies:
    """Clones parameters in results of `state_dict()`, since their buffers are reused after their units are released."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def __reduce__(self) -> Any:
        return StateCopies, ()  # a copied or unpickled module has shown nothing yet

    def put(self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace the parameters of `module` in `state` by copies. A state-dict post-hook."""
        for name in module._parameters:
            key = prefix + name
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):  # Parameters: keep_vars=True
                continue
            state[key] = copied = value.detach().clone()
            self.note(key, copied)

    def note(self, key: str, copied: torch.Tensor) -> None:
        """Detect edits of `copied`, a new tensor that a state_dict shows as `key`, from now on."""
        if is_plain(copied) and not copied.is_inference():
            counter = copied.detach()
            counter.data = copied.new_empty(0)  # keeps the version counter, not the memory
            self._copies.append(_Copy(key, weakref.ref(copied), counter, copied._version))

    def check(self) -> None:
        """Raise UsageError if a copy was edited in place since it was made, once per edited copy."""
        if not self._copies:
            return
        edited = [copy.key for copy in self._copies if copy.is_edited]
        self._copies = [copy for copy in self._copies if not copy.is_edited and copy.tensor() is not None]
        if edited:
            raise UsageError(
                f"{edited[0]} of the model's state_dict() was edited in place. It is a copy while an engine has the "
                "parameters, and if they are its tiles, so the model did not change. To change the model, edit its "
                "parameters under torch.no_grad(). To keep values of your own, clone them from state_dict() first."
            )


_OBJECTS_AT_MOST = 300_000
"""Largest number of objects visited by a search; targets further away are not found."""
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType, CodeType)


def find_paths(roots: Iterable[tuple[str, object]], targets: Collection[int]) -> dict[int, str]:
    """Return id → a shortest path from `roots`, for ids in `targets` reached through containers, attributes, closures
    and partials.

    roots: (path, object) pairs. targets: ids of objects.
    """
    found: dict[int, str] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, object]] = deque(roots)
    looked_at = 0
    while queue and looked_at < _OBJECTS_AT_MOST and len(found) < len(targets):
        path, value = queue.popleft()
        looked_at += 1
        if id(value) in targets:
            found.setdefault(id(value), path)
        # By `type`, since `isinstance` may run code of the object's class.
        if id(value) in seen or issubclass(type(value), _LEAVES):
            continue
        seen.add(id(value))
        # The queue is bounded too: one list may have more items than the search may visit.
        room = _OBJECTS_AT_MOST - len(queue)
        queue.extend((path + step, child) for step, child in islice(_children(value), room))
    return found


def _children(value: Any) -> Iterator[tuple[str, object]]:
    """Yield (path step, object) for everything that `value` refers to. Runs no code of its class."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, item in list(dict.items(value)):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[{type(key).__name__}]", item
    elif issubclass(kind, (list, tuple, deque)):
        yield from ((f"[{number}]", item) for number, item in enumerate(list(kind.__iter__(value))))
    elif issubclass(kind, (set, frozenset)):
        yield from (("{…}", item) for item in list(kind.__iter__(value)))
    elif kind is FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from _cell(name, cell)
        yield from ((".<default>", item) for item in value.__defaults__ or ())
        yield from ((f".<default {name}>", item) for name, item in (value.__kwdefaults__ or {}).items())
    elif kind is MethodType:
        yield ".__self__", value.__self__
    elif issubclass(kind, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if issubclass(type(attributes), dict):
        yield from ((f".{name}", item) for name, item in list(dict.items(attributes)))


def _cell(name: str, cell: Any) -> Iterator[tuple[str, object]]:
    try:
        yield f".<closure {name}>", cell.cell_contents
    except ValueError:  # not assigned yet
        return


def describe_holder(value: object, besides: object) -> str:
    """Describe what refers to `value`, for an error: the path from a variable, else the types of the referrers.

    besides: a referrer to leave out.
    """
    path = find_paths(_variables(), {id(value)}).get(id(value))
    if path:
        return path
    kinds = {
        type(each).__name__ for each in gc.get_referrers(value) if each is not besides and type(each) is not FrameType
    }
    return f"in a {' and a '.join(sorted(kinds))}" if kinds else "in a NumPy array or in native code"


def _variables() -> Iterator[tuple[str, object]]:
    """Yield (path, value) of local variables in all running functions, innermost first, then of their modules."""
    frames = list(_callers())
    for frame in frames:
        if frame.f_code.co_name != "<module>":
            yield from ((f"{frame.f_code.co_name}(): {name}", value) for name, value in frame.f_locals.items())
    for scope in {id(frame.f_globals): frame.f_globals for frame in frames}.values():
        module = scope.get("__name__")
        yield from (
            (f"module {module}: {name}", value) for name, value in list(scope.items()) if not name.startswith("__")
        )


def _callers() -> Iterator[FrameType]:
    """Yield frames of the present thread outside of this package, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] != "infinity":
            yield frame
        frame = frame.f_back


def refresh_locals() -> None:
    """Drop references to deleted local variables.

    Before Python 3.13 a frame caches its locals when they are listed, as in `describe_holder`, and keeps variables that
    were deleted since.
    """
    for frame in _callers():
        frame.f_locals  # noqa: B018

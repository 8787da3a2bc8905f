"""Finds the path of attributes and items that leads to an object, for error messages."""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

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

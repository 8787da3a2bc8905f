"""Keeps the engine's code out of `torch.compile`: modules' own forwards are compiled, the code around them is not.

A graph's parameters are its inputs, so they must be resident before it starts. Units are therefore fetched and held
outside of graphs: a graph breaks at every module that holds units, and a new one starts in its forward.

Dynamo intercepts the frames of a thread through a callback and skips functions with certain attributes. This module
sets both as `torch.compiler.disable` does, but without importing `torch._dynamo`, which takes seconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch._C._dynamo import eval_frame

from infinity.errors import UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

exchange_callback = eval_frame.set_eval_frame
"""Set Dynamo's callback of the current thread (None: compile nothing) and return the previous one."""

_REASON = (
    "an Infinity engine fetches and releases parameters around this call, which cannot be in a graph: leave out "
    "fullgraph=True, or compile modules that are a unit each (infinity.unit_size) before infinity.initialize()"
)


def refuse_compiled_autograd() -> None:
    """Raise UsageError if compiled autograd is enabled. It is off if its modules were never imported."""
    config: Any = sys.modules.get("torch._dynamo.config")
    running: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(config, "compiled_autograd", False) or getattr(running, "compiled_autograd_enabled", False):
        raise UsageError(
            "Compiled autograd is switched on (torch._dynamo.config.compiled_autograd or "
            "torch._dynamo.compiled_autograd). It runs backward as one graph, in which no unit can be fetched, updated "
            "or released. Switch it off: torch.compile compiles the backward of each block without it."
        )


def _pass_over(code: CodeType) -> None:
    """Exclude frames of `code` from compilation. Frames of its callees are compiled as usual."""
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))


def runs_as_it_is(function: _F) -> _F:
    """Exclude the function's own frame from compilation. Dynamo may still trace it as part of a caller."""
    _pass_over(function.__code__)
    return function


def breaks_graphs(function: _F, *, recursive: bool = False) -> _F:
    """Make Dynamo call `function` without tracing it. Its callees are compiled if `exchange_callback` allows it.

    Marks `function` in place, and its code object, which closures share.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    marked._torchdynamo_disable_recursive = recursive
    _pass_over(marked.__code__)
    return function


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap `function` so that Dynamo traces neither it nor its callees."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Dynamo compiles frames by a callback of the thread; without one it leaves the callees alone.
        callback = exchange_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            exchange_callback(callback)

    return breaks_graphs(run, recursive=True)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of `torch.compile`; `module` itself if it is not wrapped."""
    while _is_wrapper(module):
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module` or a module in it runs compiled."""
    return any(_is_wrapper(part) or part._compiled_call_impl is not None for part in module.modules())


def own_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the prefixes of `torch.compile` wrappers."""
    return name.replace("_orig_mod.", "")


def _is_wrapper(module: nn.Module) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def wraps(call: Callable[..., Any]) -> Callable[[_F], _F]:
    """`functools.wraps` without Dynamo's attributes of `call`, which would make Dynamo treat the wrapper as `call`."""

    def update(wrapper: _F) -> _F:
        functools.update_wrapper(wrapper, call)
        for name in [name for name in wrapper.__dict__ if name.startswith("_torchdynamo_")]:
            del wrapper.__dict__[name]
        return wrapper

    return update

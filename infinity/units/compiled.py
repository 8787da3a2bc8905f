"""Keeps the engine's code out of `torch.compile`: modules' own forwards are compiled, the code around them is not.

A graph's parameters are its inputs, so they must be resident before it starts. Units are therefore fetched and held
outside of graphs: a graph breaks at every module that holds units, and a new one starts in its forward.

Dynamo intercepts the frames of a thread through a callback and skips functions with certain attributes. This module
sets both as `torch.compiler.disable` does, but without importing `torch._dynamo`, which takes seconds.

Shields the engine's operations from modes of the user's code.

Dispatch and inference modes, `torch.device(...)` contexts, torch.func transforms and traces of torch.jit apply to the
model's operations only. Otherwise selective checkpointing would count the engine's operations, vmap would wrap its
buffers, sizes would be tensors, and tensors created for transfers would remain inference tensors after the mode ends.

Finds the parameters that an operation writes, and hooks that may write some during a backward.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import _disable_current_modes

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


_NOTHING: AbstractContextManager[object] = nullcontext()
_pop_mode, _push_mode = torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_FUNCTORCH = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
HOOKS_REFUSED = "don't yet support saved tensor hooks"
"""Part of the message of torch.func's error for a derivative in a forward with saved-tensor hooks."""


def in_derivative() -> bool:
    """True if a torch.func transform other than vmap is active: its graphs do not use saved-tensor hooks.

    False in `outside_modes`, which suspends them.
    """
    if not torch._C._are_functorch_transforms_active() or _is_excluded(_FUNCTORCH):
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def transformed(name: str) -> UsageError:
    """Return the error for a torch.func derivative that needs parameters of an engine. name: parameter or unit."""
    return UsageError(
        f"a derivative by torch.func (grad, vjp, jvp, jacrev, hessian) needs parameters of an engine ({name}), whose "
        "memory is lent to other units before it is finished. Use torch.autograd.grad or torch.autograd.functional, or "
        "give torch.func.functional_call tensors of your own for all parameters (p.detach().clone())."
    )


def refused_derivative() -> UsageError:
    """Return the error that names what torch.func refused."""
    return UsageError(
        "a derivative by torch.func (grad, vjp, jacrev, hessian) was taken in the forward of a model that an engine "
        "has: PyTorch refuses it under saved-tensor hooks, which every forward of an engine needs. Use "
        "torch.autograd.grad(..., create_graph=True) or torch.autograd.functional."
    )


def outside_modes() -> AbstractContextManager[object]:
    """Suspend every mode of this thread in the block. Costs a microsecond if no mode is active."""
    dispatch, function = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    transforms, inference = torch._C._are_functorch_transforms_active(), torch.is_inference_mode_enabled()
    trace = torch._C._get_tracing_state()
    # The usual case, which every operation of the engine pays for.
    if not (function or transforms or inference or trace):
        return _without_dispatch() if dispatch else _NOTHING
    suspended = ExitStack()
    if trace:
        set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
        set_trace(None)
        suspended.callback(set_trace, trace)
    if inference:
        suspended.enter_context(torch.inference_mode(False))
    if transforms:
        suspended.enter_context(torch._C._DisableFuncTorch())
    if function:
        suspended.enter_context(torch._C.DisableTorchFunction())
    if dispatch:
        suspended.enter_context(_without_dispatch())
    return suspended


def _without_dispatch() -> AbstractContextManager[object]:
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return _disable_current_modes()  # an export, which has modes on a stack of their own
    return _WithoutDispatch()


class _WithoutDispatch(AbstractContextManager[object]):
    """Suspends dispatch modes as torch's `_disable_current_modes` does, whose checks take several times as long."""

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        self._modes = [_pop_mode(None) for _ in range(torch._C._len_torch_dispatch_stack())]

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            _push_mode(mode)


_IN_PLACE = re.compile(
    r"(?!__).*_$|__i(add|and|div|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor)__$|__set(item)?__$"
)
"""Names of operations that write their first argument: `add_`, `_foreach_add_`, `__iadd__`, `w[0] = …`, `.data = …`."""


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `func`, an operation on tensors, writes."""
    schema = getattr(func, "_schema", None)
    if schema is not None:  # an operator of torch.ops
        writes = [place.alias_info is not None and place.alias_info.is_write for place in schema.arguments]
        names = [place.name for place, is_write in zip(schema.arguments, writes, strict=True) if is_write]
        given = [value for value, is_write in zip(args, writes, strict=False) if is_write]
        return [*given, *(kwargs[name] for name in names if name in kwargs)]
    # Functions of the Python interface have no schema, so the name has to tell.
    in_place = _IN_PLACE.match(getattr(func, "__name__", "")) is not None
    return [*(args[:1] if in_place else ()), kwargs.get("out")]


def has_backward_hooks(model: nn.Module) -> bool:
    """Return whether modules or parameters of `model`, or all modules, have hooks that run in backward."""
    torch_module = nn.modules.module
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return True
    with torch._C.DisableTorchFunctionSubclass():  # which would fetch parameters
        for module in model.modules():  # one walk, since it takes longer than the looks
            if module._backward_hooks or module._backward_pre_hooks:
                return True
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:
                    return True  # one is the engine's
    return False

"""The saved-tensor hooks that are in effect in this thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

__all__ = ["topmost_hooks"]

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack and unpack."""


class _Found(ctypes.Structure):
    """std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>. A SafePyObject is an object's address, to which
    it has a reference, and that of its interpreter.
    """

    _fields_ = (
        ("pack", ctypes.c_void_p),
        ("_pack_interpreter", ctypes.c_void_p),
        ("unpack", ctypes.c_void_p),
        ("_unpack_interpreter", ctypes.c_void_p),
        ("present", ctypes.c_bool),
    )


def _from_library() -> Callable[[bool], Hooks | None]:
    """Return the function for torch 2.6 and 2.7, which have it in C++ only: at::SavedTensorDefaultHooks::get_hooks().

    The C++ ABI returns a result of this size in memory, as C does, so ctypes can call it. PyDLL keeps the GIL, which
    the call needs.
    """
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get = library._ZN2at23SavedTensorDefaultHooks9get_hooksEv
    get.argtypes, get.restype = (), _Found
    set_tracing: Any = torch._C._autograd._saved_tensors_hooks_set_tracing

    def topmost(ignore_is_tracing: bool) -> Hooks | None:
        tracing = set_tracing(False) if ignore_is_tracing else None
        found = get()
        if tracing:
            set_tracing(True)
        return (_owned(found.pack), _owned(found.unpack)) if found.present else None

    return topmost


def _owned(address: int) -> Any:
    """Return the object at `address`, and drop the reference that came with the address."""
    there = ctypes.cast(address, ctypes.py_object)
    found = there.value
    ctypes.pythonapi.Py_DecRef(there)
    return found


_from_torch = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
topmost_hooks: Callable[[bool], Hooks | None] = _from_library() if _from_torch is None else _from_torch
"""Return the topmost hooks of this thread, or None. Argument: True returns them while Dynamo traces, too."""

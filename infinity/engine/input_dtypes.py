"""Names the inputs behind PyTorch's error about two dtypes: a model in bf16 or fp16 was given float32.

Nothing is checked before the forward, since a model may cast its inputs itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import SequenceKey, keystr, tree_flatten_with_path

from infinity.errors import InfinityError, UsageError
from infinity.units.compiled import breaks_graphs

if TYPE_CHECKING:
    from infinity.config import Config

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|input type", re.IGNORECASE)
"""Texts of torch's errors about two dtypes: of matrix products, convolutions, norms, recurrent layers, attention."""
_UNSUPPORTED = "not implemented for"
"""In torch's error about an operation that a dtype lacks, which no cast to that dtype would help."""
_NAMED = 3
"""Inputs that an error names; it counts the others."""
_NAMES = {
    torch.float32: re.compile(r"\bfloat(32)?\b", re.IGNORECASE),
    torch.float64: re.compile(r"\b(double|float64)\b", re.IGNORECASE),
    torch.float16: re.compile(r"\b(half|float16)\b", re.IGNORECASE),
    torch.bfloat16: re.compile(r"\bbfloat16\b", re.IGNORECASE),
}
"""Dtype → its names in torch's errors, which name both dtypes. An input of a third one has no part in an error."""
_SECTIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class InputDtypes:
    """The dtype of a model's floating-point parameters, and the config's casts of inputs to it."""

    dtype: torch.dtype
    casts: bool
    """Positional arguments are cast to `dtype`."""
    setting: str
    """The setting that casts them; empty if the config has none for `dtype`."""

    @classmethod
    def of(cls, config: Config, dtype: torch.dtype | None) -> InputDtypes | None:
        """dtype: of all floating-point parameters; None: their own, about which nothing is known."""
        if dtype is None:
            return None
        name = _SECTIONS.get(dtype)
        if name is None:
            return cls(dtype, False, "")
        section = config.bf16 if name == "bf16" else config.fp16
        setting = f"{name}.auto_cast" if section.enabled else f"{name}.enabled and {name}.auto_cast"
        return cls(dtype, section.enabled and section.auto_cast, setting)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `call`, and raises UsageError from PyTorch's error about two dtypes if a
        floating-point argument has another dtype than the parameters. Other errors pass unchanged.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except (RuntimeError, ValueError) as error:  # ValueError: of recurrent layers
                text = str(error)
                if isinstance(error, InfinityError) or _UNSUPPORTED in text or not _ABOUT_DTYPES.search(text):
                    raise
                if isinstance(error, ValueError) and not _is_from_torch(error):
                    raise
                found = [each for each in self._others(args, kwargs) if _is_named(each[1], text)]
                if not found:
                    raise
                # Without a name: a variable of this frame would keep the error, which keeps the frame.
                raise UsageError(f"{self._text(found)} PyTorch's error: {text}") from error

        return breaks_graphs(run)

    def _others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.dtype, bool]]:
        """Return (name, dtype, passed by keyword) of floating-point arguments in another dtype, which no cast met."""
        positional = [] if self.casts else [(*each, False) for each in _floats(args)]
        named = [(*each, True) for each in _floats(dict(kwargs))]
        return [each for each in [*positional, *named] if each[1] != self.dtype]

    def _text(self, found: list[tuple[str, torch.dtype, bool]]) -> str:
        named = [f"input {name} is {_name(dtype)}" for name, dtype, _ in found[:_NAMED]]
        if len(found) > _NAMED:
            named.append(f"{len(found) - _NAMED} more differ")
        it = "it" if len(found) == 1 else "them"
        fix = f"Pass {it} in that dtype"
        by_keyword = [keyword for *_, keyword in found]
        if self.setting and all(by_keyword):
            fix += f", since {self.setting.rpartition(' ')[2]} casts positional arguments only"
        elif self.setting:
            fix += f", or set {self.setting} to true"
            fix += ", which casts positional arguments only" if any(by_keyword) else ""
        return f"{', '.join(named)}, and the model computes in {_name(self.dtype)}. {fix}."


def _floats(arguments: tuple[Any, ...] | dict[str, Any]) -> Iterator[tuple[str, torch.dtype]]:
    """Yield (name, dtype) of the floating-point tensors among arguments and in their containers."""
    for path, leaf in tree_flatten_with_path(arguments)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            first = path[0]
            name = first.idx if isinstance(first, SequenceKey) else repr(getattr(first, "key", ""))
            yield f"{name}{keystr(path[1:])}", leaf.dtype


def _is_named(dtype: torch.dtype, text: str) -> bool:
    return dtype in _NAMES and _NAMES[dtype].search(text) is not None


def _is_from_torch(error: Exception) -> bool:
    """Return whether Python code of torch raised the error, and not the model's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

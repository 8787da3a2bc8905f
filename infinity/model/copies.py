"""Copies parameters in results of `state_dict()` and detects in-place edits, which would change a plain model."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.comm.dtensor import is_plain
from infinity.errors import UsageError


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

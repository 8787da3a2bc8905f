"""Keeps the parameters of a model that is being built within a few units of memory, and the rest in files.

torch's hook tells of every parameter that a module registers, and the module's dict of parameters of every use. When
those that were used lately exceed a budget, the longest unused are moved to a file that stays mapped
(`infinity.tiers.mapped`), and their pages taken out of memory. They are ordinary tensors there: whoever holds one,
reads it, edits it in place or through `.data`, copies or ties it, works with its values. So what is noted here, and
when something is moved, decides about memory only, never about a result.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.errors import ModelError
from infinity.tiers.mapped import MappedFile
from infinity.tiers.memory import PAGE, return_freed_memory, storage_users
from infinity.units.released import is_released


def check_kept(model: nn.Module) -> None:
    """OSError if the disk lost values of a model that was built with Init."""
    found = (module._parameters for module in model.modules())
    for spill in {parameters.spill for parameters in found if isinstance(parameters, NotedParameters)}:
        spill.check()


def notice(spill: Spill, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """A module is about to register a parameter: have its dict of parameters tell `spill` of that, and of its use."""
    if not is_lazy(parameter) and parameter.device.type not in ("cpu", "meta"):
        raise ModelError(
            f"parameter {name} of a {type(module).__name__} is built on {parameter.device}: under infinity.Init build "
            "the model on the cpu (`with torch.device('cpu')`); infinity.initialize takes it to the device, unit by "
            "unit"
        )
    if type(module._parameters) in (dict, OrderedDict):
        module.__dict__["_parameters"] = NotedParameters(module._parameters, spill)


class NotedParameters(dict[str, Any]):
    """A module's `_parameters` that tells `spill` of each parameter as it is set or read."""

    def __init__(self, parameters: Mapping[str, Any], spill: Spill) -> None:
        super().__init__(parameters)
        self.spill = spill

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        super().__setitem__(name, parameter)
        self.spill.note(parameter)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter: nn.Parameter | None = super().__getitem__(name)
        self.spill.note(parameter)
        return parameter

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """One by one, each noted when it is its turn."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedParameters:
        """Copies of modules are parts of models as well: `nn.TransformerEncoder` is made of them."""
        copied = memo[id(self)] = NotedParameters({}, self.spill)
        for name, parameter in self.items():
            copied[name] = deepcopy(parameter, memo)
        return copied

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Spill:
    """Keeps the parameters that it is told of within `budget` bytes of memory, and the rest in files.

    folders: one file in each. What shares its memory with other tensors stays there as long as it does. Any thread may
    call it.
    """

    def __init__(self, folders: Sequence[Path], budget: int) -> None:
        self._files = [MappedFile(folder) for folder in folders]
        self._budget = budget
        self._lock = threading.RLock()
        # By id, since torch refuses to swap tensors that somebody has a weak reference to.
        self._used: dict[int, _Noted] = {}
        """In the order of their last use."""
        self._nbytes = 0
        """What those in `_used` have in memory, at most."""
        self._later: dict[int, _Noted] = {}
        """Could not be moved when it was their turn, as something else referred to their memory or was busy with it."""
        self._alone = _users(torch.empty(1, device="cpu"))

    @property
    def nbytes(self) -> int:
        """What is on disk now."""
        return sum(file.nbytes for file in self._files)

    def check(self) -> None:
        for file in self._files:
            file.check()

    def note(self, parameter: nn.Parameter | None) -> None:
        """`parameter` is about to be used."""
        if parameter is None or is_lazy(parameter) or parameter.device.type != "cpu":
            return
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes < PAGE:
            return
        with self._lock:
            self._forget(id(parameter))
            self._used[id(parameter)] = _Noted(parameter, nbytes, threading.current_thread())
            self._nbytes += nbytes
            if self._nbytes > self._budget and not torch._C._len_torch_dispatch_stack():
                # Whatever defaults the code around has set: the values stay what they are, on the cpu.
                with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                    self._relieve()

    def _forget(self, key: int) -> None:
        self._later.pop(key, None)
        noted = self._used.pop(key, None)
        self._nbytes -= noted.nbytes if noted is not None else 0

    def _relieve(self) -> None:
        """Let go of what was not used for longest, down to half of the budget; not of the last, which is about to be
        used.
        """
        moved = 0
        again, self._later = self._later, {}
        for noted in again.values():
            moved += self._let_go(noted)
        for key, noted in list(self._used.items())[:-1]:
            if self._nbytes <= self._budget // 2:
                break
            self._forget(key)
            moved += self._let_go(noted)
        if moved:
            return_freed_memory()

    def _let_go(self, noted: _Noted) -> bool:
        """Whether it was moved to a file just now."""
        parameter = noted.parameter
        if is_released(parameter) or not _is_plain(parameter):
            return False  # managed by an engine, or of a kind that cannot be moved
        storage = parameter.untyped_storage()
        if storage.nbytes() < PAGE or any(file.let_go(storage) for file in self._files):
            return False
        del storage  # it would count
        if _users(parameter) != self._alone or noted.is_busy():
            self._later[id(parameter)] = noted
            return False
        whole = torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage())
        kept = max(self._files, key=lambda file: file.free).store(whole)
        place = parameter.storage_offset(), parameter.shape, parameter.stride()
        parameter.data = torch.empty(0, dtype=parameter.dtype).set_(kept.untyped_storage(), *place)
        return True


class _Noted(NamedTuple):
    """A parameter that was used."""

    parameter: nn.Parameter
    nbytes: int
    thread: threading.Thread
    """Uses it, and may be writing to it."""

    def is_busy(self) -> bool:
        return self.thread is not threading.current_thread() and self.thread.is_alive()


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors refer to the memory of `tensor`, and how many variables to its storage; with some of its own."""
    storage = tensor.untyped_storage()
    return storage_users(tensor), sys.getrefcount(storage)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether it is an ordinary tensor in the memory of this process."""
    value = parameter.data
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_inference() or value.is_shared())
    )

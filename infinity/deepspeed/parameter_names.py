"""Names that DeepSpeed adds to the parameters of a stage 3 engine, such as `ds_shape` and `partition_numel`.

Each is a descriptor of `nn.Parameter` that finds the engine of the parameter, so a parameter carries no state: copies
and pickles of it are those of a plain one. Parameters of other engines, and after `destroy`, lack the names.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import infinity.engine.gather as gather
from infinity.engine.base import BaseEngine
from infinity.units.unit import Unit


class ZeroParamStatus(Enum):
    """Status of a tensor, in its attribute `ds_status`: libraries gather parameters that are not AVAILABLE.

    NOT_AVAILABLE for the parameters of a stage 3 engine, outside of forwards and of blocks of `GatheredParameters` that
    hold them; AVAILABLE for other tensors.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_ids = count()
_numbers: WeakKeyDictionary[BaseEngine, dict[int, int]] = WeakKeyDictionary()
"""Engine whose parameters have the names → `id` of a parameter → its `ds_id`."""


def answer(engine: BaseEngine) -> None:
    """Give the names to the parameters of `engine` until it is closed."""
    # In a Python backward, autograd passes a tensor in place of a saved parameter. TRL reads the status there.
    torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for name, read in _NAMES.items():
        if name not in vars(nn.Parameter):
            setattr(nn.Parameter, name, _Name(name, read))
    _numbers[engine] = {id(parameter): next(_ids) for parameter in engine.module.parameters()}


_Read = Callable[[nn.Parameter, BaseEngine, Unit], Any]


class _Name:
    """An attribute that the engine of a parameter computes. A value that is set on the parameter itself comes first."""

    def __init__(self, name: str, read: _Read) -> None:
        self._name, self._read = name, read

    def __get__(self, parameter: nn.Parameter | None, kind: type) -> Any:
        if parameter is None:
            return self
        found = gather._find(parameter)
        if found is None or found[0] not in _numbers:
            if hasattr(torch.Tensor, self._name):
                return getattr(torch.Tensor, self._name)
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        return self._read(parameter, *found[:2])


def _partition_numel(parameter: nn.Parameter, engine: BaseEngine, unit: Unit) -> int:
    return -(-parameter.numel() // engine.ranks.size)


def _part(parameter: nn.Parameter, engine: BaseEngine, unit: Unit) -> torch.Tensor:
    """Return a tensor on the meta device, with the size and dtype of a rank's part of the parameter."""
    part = torch.empty(_partition_numel(parameter, engine, unit), dtype=parameter.dtype, device="meta")
    part.ds_numel = part.numel()  # type: ignore[attr-defined]
    return part


def _refuse(parameter: nn.Parameter, engine: BaseEngine, unit: Unit) -> Any:
    raise AttributeError(
        "a parameter's all_gather() and partition() have no counterpart here: gather it in a block `with "
        "deepspeed.zero.GatheredParameters(parameters):`"
    )


_NAMES: dict[str, _Read] = {
    "ds_id": lambda parameter, engine, unit: _numbers[engine][id(parameter)],
    "ds_shape": lambda parameter, engine, unit: parameter.shape,
    "ds_numel": lambda parameter, engine, unit: parameter.numel(),
    "ds_status": lambda parameter, engine, unit: (
        ZeroParamStatus.AVAILABLE if unit.pin_count else ZeroParamStatus.NOT_AVAILABLE
    ),
    "ds_tensor": _part,
    "ds_process_group": lambda parameter, engine, unit: engine.ranks.replicas,
    "ds_persist": lambda parameter, engine, unit: False,
    "ds_active_sub_modules": lambda parameter, engine, unit: set(),
    "partition_numel": lambda parameter, engine, unit: lambda: _partition_numel(parameter, engine, unit),
    "all_gather": _refuse,
    "partition": _refuse,
}
"""Name → function that computes its value."""

"""The ranks that hold one model together: tensor parallelism (`torch.distributed.tensor.parallel`), which divides
parameters themselves. Data parallelism goes on top: every rank's units are its parts of the parameters.

What is here runs in the thread of the model, as the model's own collectives do, so that one order holds for both.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.comm.groups import timeout_of
from infinity.errors import ModelError
from infinity.units.local import is_distributed, local, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelRanks:
    """The mesh that the model's DTensors are divided over; without any, this rank alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    @classmethod
    def of(cls, model: nn.Module, replicas: dist.ProcessGroup | None) -> ModelRanks:
        """The mesh of `model`. replicas: the ranks that units are sharded over; the mesh may not divide over them too.

        Raises ModelError for parameters that this engine cannot shard further.
        """
        found: Any = None
        for name, parameter in model.named_parameters():
            if not is_distributed(parameter):
                continue
            divided: Any = parameter
            if found is not None and divided.device_mesh != found:
                raise ModelError(f"parameter {name} is a DTensor on another mesh than those before it: use one mesh")
            found = divided.device_mesh
            if any(placement.is_partial() for placement in divided.placements):
                raise ModelError(f"parameter {name} is a DTensor that is still to be summed: redistribute it first")
            if replicas is None or set(found.mesh.flatten().tolist()) & set(dist.get_process_group_ranks(replicas)) != {
                dist.get_rank()
            }:
                raise ModelError(
                    f"parameter {name} is a DTensor over ranks that its units would be sharded over as well: give "
                    'infinity.initialize the ranks that hold the same part of the model, as process_group=mesh["dp"]'
                )
        return cls(found)

    @property
    def size(self) -> int:
        return 1 if self._mesh is None else int(self._mesh.size())

    @property
    def first(self) -> bool:
        """Whether this rank is the one that speaks for all that hold this model."""
        return self._mesh is None or not any(self._mesh.get_coordinate() or ())

    @property
    def number(self) -> int:
        """Which of these ranks this one is, in the order of a group of them."""
        return 0 if self._mesh is None else sorted(self._mesh.mesh.flatten().tolist()).index(dist.get_rank())

    def twin(self) -> dist.ProcessGroup | None:
        """A new group of these ranks for host memory, beside the model's own; they all call this."""
        if self._mesh is None:
            return None
        made: dist.ProcessGroup = dist.new_group(
            self._mesh.mesh.flatten().tolist(),
            timeout=timeout_of(self._mesh.get_group(0)),
            backend="gloo",
            use_local_synchronization=True,
        )
        return made

    def copies(self, parameter: torch.Tensor) -> int:
        """How many of these ranks hold the same values of `parameter`."""
        if self._mesh is None:
            return 1
        if not is_distributed(parameter):
            return self._mesh.size()
        spec: Any = spec_of(parameter)
        return prod(self._mesh.size(dim) for dim, where in enumerate(spec.placements) if where.is_replicate())

    def sums(self, *values: float) -> tuple[float, ...]:
        """The sum of each fp64 number over these ranks, in their order; every rank gets the same bits."""
        if self._mesh is None:
            return values
        for dim in range(self._mesh.ndim):
            group = self._mesh.get_group(dim)
            mine = torch.tensor(values, dtype=torch.float64, device=self._mesh.device_type)
            parts = torch.empty((group.size(), len(values)), dtype=torch.float64, device=mine.device)
            dist.all_gather(list(parts), mine, group=group)
            values = tuple(sum(column) for column in zip(*parts.tolist(), strict=True))
        return values

    def gather(self, mine: Any) -> list[Any]:
        """All-gather a small object: one from each of these ranks, in rank order."""
        found = [mine]
        for dim in range(self._mesh.ndim if self._mesh is not None else 0):
            assert self._mesh is not None
            group = self._mesh.get_group(dim)
            columns: list[Any] = [None] * group.size()
            dist.all_gather_object(columns, found, group=group)
            found = [each for column in columns for each in column]
        return found

    def whole(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A state of `parameter`, complete on all of these ranks, from `values`, what this rank holds of it.

        values: in the local shape, on the host, any dtype; the result, on the host, has the parameter's shape.
        """
        if not is_distributed(parameter):
            return values
        from torch.distributed.tensor import DTensor

        spec: Any = spec_of(parameter)
        there = values.to(local(parameter).device)
        stride = torch.empty(parameter.shape, device="meta").stride()
        divided = DTensor.from_local(
            there, spec.mesh, spec.placements, run_check=False, shape=parameter.shape, stride=stride
        )
        return divided.full_tensor().cpu()

    def part(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`, a state in the parameter's shape: a view of it in the local shape."""
        return full[self.place(parameter)] if is_distributed(parameter) else full

    def place(self, parameter: torch.Tensor) -> tuple[slice, ...]:
        """Where what this rank holds of `parameter`, a DTensor, is in the whole of it."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spec: Any = spec_of(parameter)
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, spec.mesh, spec.placements)
        return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))

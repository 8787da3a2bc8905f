"""Local values of a parameter: all of it, or this rank's part of a `DTensor` under tensor parallelism.

Units keep only local values. Sharding over data-parallel ranks applies on top of that, and the model's own collectives
(`torch.distributed.tensor.parallel`) run unchanged.

Ranks of one model replica under tensor parallelism (`torch.distributed.tensor.parallel`), which shards parameters.

Data parallelism applies on top: each rank's units hold its local parts of the parameters. These collectives run in the
model's thread, like the model's own, so that both have one order.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.comm.groups import gather_objects, new_group, timeout_of
from infinity.errors import ModelError
from infinity.sizes import sum_in_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PLAIN = (torch.Tensor, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if `tensor` is a torch.Tensor or an nn.Parameter, not a subclass, which may carry more than its memory."""
    return type(tensor) in _PLAIN


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor."""
    return _is_dtensor(type(tensor))


@cache  # also without the library: a class that exists before its import is no DTensor
def _is_dtensor(kind: type) -> bool:
    library = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds
    return library is not None and issubclass(kind, library.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of `tensor`, in the same memory."""
    return tensor._local_tensor if _is_dtensor(type(tensor)) else tensor  # type: ignore[attr-defined]


def set_local(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace this rank's values of `parameter` by `values`, without a copy. `parameter` stays the same object."""
    if is_distributed(parameter):
        # `.data` of a DTensor would be a DTensor: only its local tensor can be replaced.
        parameter._local_tensor = values.data  # type: ignore[attr-defined]
    else:
        parameter.data = values


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `gradient`, sharded like `parameter`. Reduces a pending (partial) sum over ranks."""
    if not is_distributed(gradient):
        return gradient
    divided: Any = gradient
    if divided.placements != parameter.placements:  # type: ignore[attr-defined]
        divided = divided.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    values: torch.Tensor = divided.to_local()
    return values


def spec_of(tensor: torch.Tensor) -> Any:
    """Return the DTensor spec of `tensor` (mesh and placements); None if it is no DTensor."""
    return tensor._spec if _is_dtensor(type(tensor)) else None  # type: ignore[attr-defined]


def of_spec(values: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of `spec` whose local part is `values`; `values` itself if spec is None."""
    if spec is None:
        return values
    whole: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor(values, spec, requires_grad=False)
    return whole


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside wrappers of torch.func, whose type is torch.Tensor too; other tensors unchanged."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is strided and has memory of its own, not a wrapper around other tensors."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return False
    return type(tensor) in _PLAIN or not (
        is_traceable_wrapper_subclass(tensor) or isinstance(tensor, torch._subclasses.FakeTensor)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is strided, not quantised and not nested, and has memory of its own, or is meta."""
    if tensor.is_quantized or tensor.is_nested or not has_storage(tensor):
        return False
    return is_plain(tensor) or _has_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a subclass has memory. A wrapper (`Tensor._make_wrapper_subclass`) has none."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return tensor.is_meta
    return True


class TensorParallelMesh:
    """The mesh of the model's DTensors; without DTensors, this rank alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    @classmethod
    def of(cls, model: nn.Module, replicas: dist.ProcessGroup | None) -> TensorParallelMesh:
        """Construct from the mesh of `model`. replicas: the data-parallel ranks, over which the mesh must not shard.

        Raises ModelError for DTensors on several meshes, with partial sums, or over the data-parallel ranks.
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
        """Return whether this rank is the first of its replica, which logs and writes."""
        return self._mesh is None or not any(self._mesh.get_coordinate() or ())

    @property
    def number(self) -> int:
        """Index of this rank in the sorted ranks of the mesh."""
        return 0 if self._mesh is None else sorted(self._mesh.mesh.flatten().tolist()).index(dist.get_rank())

    def duplicate_group(self) -> dist.ProcessGroup | None:
        """Create a gloo group of these ranks, apart from the model's own; None without a mesh. All of them call it."""
        if self._mesh is None:
            return None
        return new_group(self._mesh.mesh.flatten().tolist(), timeout_of(self._mesh.get_group(0)), "gloo")

    def copies(self, parameter: torch.Tensor) -> int:
        """Return the number of these ranks that hold the same values of `parameter`."""
        if self._mesh is None:
            return 1
        if not is_distributed(parameter):
            return self._mesh.size()
        spec: Any = spec_of(parameter)
        return prod(self._mesh.size(dim) for dim, where in enumerate(spec.placements) if where.is_replicate())

    def sums(self, *values: float) -> tuple[float, ...]:
        """Return the sum of each fp64 number over these ranks, in rank order, with the same bits on all."""
        if self._mesh is None:
            return values
        for dim in range(self._mesh.ndim):
            group = self._mesh.get_group(dim)
            # On the mesh's device: its backend may have no collectives of host memory.
            mine = torch.tensor(values, dtype=torch.float64, device=self._mesh.device_type)
            parts = torch.empty((group.size(), len(values)), dtype=torch.float64, device=mine.device)
            dist.all_gather(list(parts), mine, group=group)
            values = tuple(sum_in_order(column) for column in zip(*parts.tolist(), strict=True))
        return values

    def gather(self, mine: Any) -> list[Any]:
        """All-gather a small object from each of these ranks, in rank order."""
        found = [mine]
        for dim in range(self._mesh.ndim if self._mesh is not None else 0):
            assert self._mesh is not None
            found = list(chain(*gather_objects(found, self._mesh.get_group(dim))))
        return found

    def whole(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """All-gather a state of `parameter` from its local parts.

        values: this rank's part, in the local shape, on the host, any dtype. Returns a host tensor in the parameter's
        shape.
        """
        if not is_distributed(parameter):
            return values
        from torch.distributed.tensor import DTensor

        spec: Any = spec_of(parameter)
        there = values.to(local(parameter).device)
        # Given, because uneven parts do not determine the shape of the whole.
        stride = torch.empty(parameter.shape, device="meta").stride()
        divided = DTensor.from_local(
            there, spec.mesh, spec.placements, run_check=False, shape=parameter.shape, stride=stride
        )
        return divided.full_tensor().cpu()

    def part(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `full`, a state in the parameter's shape: a view in the local shape."""
        return full[self.place(parameter)] if is_distributed(parameter) else full

    def place(self, parameter: torch.Tensor) -> tuple[slice, ...]:
        """Return the slices of this rank's part in the whole of `parameter`, a DTensor."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spec: Any = spec_of(parameter)
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, spec.mesh, spec.placements)
        return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))

"""Process groups: over which ranks a model's units are sharded, and groups of the engine's own over the same ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from infinity.errors import UsageError

Group: TypeAlias = dist.ProcessGroup | DeviceMesh
"""What a user says the data-parallel ranks with; a mesh has one dimension."""


def data_parallel(given: Group | None) -> dist.ProcessGroup | None:
    """The ranks that units are sharded over: those given, else all; None without torch.distributed.

    Raises UsageError for what is no group that this rank is in.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if given is not None:
            raise UsageError("process_group was given, but torch.distributed is not initialised: start with torchrun")
        return None
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ()
            raise UsageError(
                f"process_group is a mesh of {given.ndim} dimensions {tuple(names)}: give the one over which the model "
                f'is replicated, as mesh["{names[0] if names else "dp"}"]'
            )
        given = given.get_group()
    if given is None:
        return dist.group.WORLD
    if not isinstance(given, dist.ProcessGroup) or dist.get_rank(given) < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the process_group that it gave: give each rank the group that it is in"
        )
    return given


def twin(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """A new group of the same ranks, with the same time-out; they all call this.

    Collectives of the engine run beside the user's own: on one group their order would be a race.
    """
    everybody = dist.get_world_size(group) == dist.get_world_size()
    if not everybody:
        _count_alike(group)
    made: dist.ProcessGroup = dist.new_group(
        None if everybody else dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend=backend,
        use_local_synchronization=not everybody,
    )
    return made


def _count_alike(group: dist.ProcessGroup) -> None:
    """Have all ranks of `group` know of as many groups.

    torch names a group of some ranks by these and by how many groups the rank that makes it knows of. Ranks that are in
    groups of their own besides would give it different names, and wait for each other under them.
    """
    names = _names()
    known: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(known, len(names), group=group)
    while len(names) < max(known):
        _occupy(f"infinity-{len(names)}")


def retire(group: dist.ProcessGroup) -> None:
    """Leave a group of the engine's own.

    A later group must not get its name (see `_count_alike`), under which the store still has addresses: so something
    without connections keeps it.
    """
    if not dist.is_initialized():
        return
    name = _names().get(group)
    dist.destroy_process_group(group)
    if name is not None:
        _occupy(name)


def _names() -> dict[dist.ProcessGroup, str]:
    """torch's names of the groups that this rank knows of."""
    return cast(dict[dist.ProcessGroup, str], dist.distributed_c10d._world.pg_names)


def _occupy(name: str) -> None:
    _names()[dist.ProcessGroup(0, 1)] = name  # type: ignore[call-arg]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """After how long a collective of `group` gives up; None if its backend does not tell."""
    for device in ("cpu", "cuda"):
        try:
            found: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return found
    return None

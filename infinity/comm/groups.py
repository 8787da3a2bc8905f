"""Process groups: selects the data-parallel ranks, and duplicates groups for the engine's own collectives.

Joins torch's process group if a launcher started several ranks and the script has not joined it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from infinity.comm import connections
from infinity.errors import InfinityError, RanksError, UsageError
from infinity.tiers.device import Device

Group: TypeAlias = dist.ProcessGroup | DeviceMesh
"""Type of the user's data-parallel group; a mesh must have one dimension."""


def data_parallel(given: Group | None) -> dist.ProcessGroup | None:
    """Return the group that units are sharded over: the given one, else all ranks; None without torch.distributed.

    Raises UsageError for a mesh of several dimensions or a group that does not contain this rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if given is not None:
            raise UsageError("process_group was given, but torch.distributed is not initialised: start with torchrun")
        return None
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ()
            raise UsageError(
                f"process_group is a mesh of {given.ndim} dimensions {tuple(names)}: pass the one over which the model "
                f'is replicated, as mesh["{names[0] if names else "dp"}"]'
            )
        given = given.get_group()
    if given is None:
        return dist.group.WORLD
    if not isinstance(given, dist.ProcessGroup) or dist.get_rank(given) < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in its process_group: pass each rank the group that it belongs to"
        )
    return given


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that `group` uses for tensors on `device`, such as "gloo" or "nccl".

    A group may have one backend for each type of device ("cpu:gloo,cuda:nccl").
    """
    try:
        name: str = group._get_backend(device).name()
    except (RuntimeError, AttributeError):  # the group has one backend, which lists other devices
        return str(dist.get_backend(group))
    return name


def duplicate_group(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """Create a new group of the same ranks with the same timeout. All its ranks call it.

    Collectives of the engine run concurrently with the user's: on one group their order would be a race.
    """
    everybody = dist.get_world_size(group) == dist.get_world_size()
    if not everybody:
        _count_alike(group)
    return new_group(None if everybody else dist.get_process_group_ranks(group), timeout_of(group), backend)


def new_group(ranks: list[int] | None, timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    """Create a group of `ranks` of the whole job, None for all. All of them call it.

    Raises RanksError if they have not connected within `timeout`.
    """
    # Before the group connects, since its sockets are those opened from here on.
    before = connections.open_sockets()
    with connecting():
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=ranks is not None
        )
    if backend == "gloo":
        connections.note(made, before)
    return made


@contextmanager
def connecting() -> Iterator[None]:
    """Raise RanksError for an error of torch in the block, in which ranks connect to each other."""
    try:
        yield
    except InfinityError:
        raise
    except RuntimeError as error:
        raise RanksError(
            f"the ranks could not connect to each other ({error}). Another rank probably ended before that: see its "
            "last messages. Fix the error and restart all ranks."
        ) from error


def _count_alike(group: dist.ProcessGroup) -> None:
    """Pad torch's group registry so that all ranks of `group` have equally many entries.

    torch names a new group by its ranks and the number of registered groups. Ranks with different numbers of groups
    would give it different names, and deadlock.
    """
    names = _names()
    most = max(gather_objects(len(names), group))
    # Placeholders: they take a number and have no connections.
    while len(names) < most:
        _occupy(f"infinity-{len(names)}")


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group of the engine's own.

    A later group must not reuse its name (see `_count_alike`), under which the store still has addresses. So a
    placeholder without connections keeps the name.
    """
    if not dist.is_initialized():
        return
    name = _names().get(group)
    # First: the descriptors close with the group, and their numbers are used again.
    connections.forget(group)
    dist.destroy_process_group(group)
    if name is not None:
        _occupy(name)


def _names() -> dict[dist.ProcessGroup, str]:
    """Return torch's registry of this rank's groups: group → name."""
    return cast(dict[dist.ProcessGroup, str], dist.distributed_c10d._world.pg_names)


def _occupy(name: str) -> None:
    _names()[dist.ProcessGroup(0, 1)] = name  # type: ignore[call-arg]


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """All-gather a small object over the ranks of `group`, by rank."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


class OnDevice:
    """Asynchronous collectives of `group`, which `device` executes after the calls return."""

    def __init__(self, group: dist.ProcessGroup, device: Device) -> None:
        self._group, self._device = group, device

    def wait(self) -> None:
        """Wait for the collectives that this thread issued."""
        self._device.compute_reached().wait()

    def abort(self) -> None:
        """Abort the collectives, from any thread. Their results are invalid."""
        backend: Any = self._group._get_backend(self._device.torch_device)
        backend.abort()


def store_of(group: dist.ProcessGroup) -> dist.distributed_c10d.Store:
    """Return a store of the ranks of `group`, on a connection of its own if torch can make one."""
    store = dist.distributed_c10d._world.pg_map[group][1]
    clone = getattr(store, "clone", None)  # a wait for a key blocks its connection
    return cast(dist.distributed_c10d.Store, store if clone is None else clone())


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of collectives of `group`; None if its backend does not expose it."""
    for device in ("cpu", "cuda"):
        try:
            found: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return found
    return None


_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each rank."""


def join_process_group(required: bool | None, device: Device | None) -> None:
    """Call `torch.distributed.init_process_group` with the launcher's environment variables, unless a group exists.

    required: None: if WORLD_SIZE is more than 1. True: always. False: never, since the caller does it. device: of the
    model; None: CUDA if available. Collectives of CUDA tensors use NCCL, those of host memory gloo.
    The group outlives every engine, because torch has one per process.

    Raises UsageError if there are several ranks, no group, and `required` is False; if the environment lacks one of the
    launcher's variables; or if this build of torch has no torch.distributed.
    """
    if not dist.is_available():
        if required or _ranks_started() > 1:
            raise UsageError("this build of torch has no torch.distributed: run one rank, or install another build")
        return
    if dist.is_initialized() or (not required and _ranks_started() <= 1):
        return
    if required is False:
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised and "
            "dist_init_required is False, so that each rank would train a model of its own: call "
            "torch.distributed.init_process_group() first, or leave dist_init_required out"
        )
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        why = "dist_init_required is True" if required else f"WORLD_SIZE is {os.environ['WORLD_SIZE']}"
        raise UsageError(
            f"{why}, but the environment lacks {', '.join(missing)}, which init_process_group() needs: start the "
            "script with torchrun, or call torch.distributed.init_process_group() before"
            + ("" if required else "; to train on one rank alone, unset WORLD_SIZE")
        )
    dist.init_process_group(_backend(device))


def _ranks_started() -> int:
    """WORLD_SIZE; 1 if it is not set. Raises UsageError if it is not a number."""
    text = os.environ.get("WORLD_SIZE", "") or "1"
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"WORLD_SIZE is {text!r}, not a number of ranks: start the script with torchrun") from None


def _backend(device: Device | None) -> str:
    # Both, as host memory is exchanged on machines with devices, too.
    on_cuda = torch.cuda.is_available() if device is None else device.torch_device.type == "cuda"
    return "cpu:gloo,cuda:nccl" if on_cuda and dist.is_nccl_available() else "gloo"

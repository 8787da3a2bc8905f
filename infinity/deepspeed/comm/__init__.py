"""`deepspeed.comm` over torch.distributed: the same collectives, and a process group of one rank without a launcher."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp

from infinity.comm.groups import join_process_group
from infinity.deepspeed.front_ends import name_backend
from infinity.deepspeed.launcher.flags import DEFAULT_PORT
from infinity.errors import UsageError
from infinity.inputs import number_of

_TIMEOUT = timedelta(minutes=30)
_OF_TORCH = frozenset(
    {
        "P2POp",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "destroy_process_group",
        "gather",
        "irecv",
        "is_available",
        "isend",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    }
)
"""Names that torch.distributed has too."""
_OTHER_NAMES = {
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "inference_all_reduce": "all_reduce",
}
_LOGGING = ("prof", "log_name", "debug")
"""Arguments of DeepSpeed's collectives that only its communication logger reads."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed, unless it is. Without a launcher, initialize a group of this process alone.

    dist_backend: torch's name; by default NCCL with CUDA, else gloo. distributed_port: sets MASTER_PORT if it is not
    set. init_method, rank, world_size: as for torch. config, verbose and auto_mpi_discovery have no effect. Raises
    UsageError if dist_init_required is False and there is no group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError(
            "dist_init_required is False, but torch.distributed is not initialized: call init_process_group() first, "
            "or leave the argument out"
        )
    if "RANK" in os.environ:  # started by a launcher
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if init_method is not None or rank >= 0:
        dist.init_process_group(dist_backend, init_method, timeout, world_size=world_size, rank=rank)
    elif "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(dist_backend or "gloo", store=store, rank=0, world_size=1, timeout=timeout)
    elif dist_backend is not None:
        dist.init_process_group(dist_backend, timeout=timeout)
    else:
        join_process_group(True, None)
    name_backend()


def is_initialized() -> bool:
    """Return whether there is a process group. Accelerate calls it instead of `init_distributed` if there is one."""
    initialized = dist.is_available() and dist.is_initialized()
    if initialized:
        name_backend()
    return initialized


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return number_of("LOCAL_RANK", 0)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return list(range(get_world_size())) if group is None else dist.get_process_group_ranks(group)


def get_world_group() -> Any:
    return dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def __getattr__(name: str) -> Any:
    target = _OTHER_NAMES.get(name, name)
    if target not in _OF_TORCH:
        raise AttributeError(f"deepspeed.comm has no {name!r} here: use torch.distributed")
    function = getattr(dist, target)
    return function if isinstance(function, type) else _without_logging(function)


def _without_logging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which ignores the arguments of DeepSpeed's communication logger."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in _LOGGING})

    return call

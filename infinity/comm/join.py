"""Joins torch's process group if a launcher started several ranks and the script has not joined it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from infinity.errors import UsageError
from infinity.tiers.device import Device

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

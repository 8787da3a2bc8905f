"""Sizes and ranks of parallel groups. All ranks are data-parallel; every other group has one rank."""

from __future__ import annotations

from typing import Any

from infinity.deepspeed import comm


def get_data_parallel_group() -> Any:
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    return comm.get_rank()


def get_tensor_model_parallel_world_size() -> int:
    return 1


def get_tensor_model_parallel_rank() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_rank() -> int:
    return 0

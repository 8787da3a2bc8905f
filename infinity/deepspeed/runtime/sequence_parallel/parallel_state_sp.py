"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: sequences are on one rank each."""

from __future__ import annotations

from infinity.deepspeed.absent import SEQUENCE
from infinity.deepspeed.comm import get_rank, get_world_size
from infinity.errors import UsageError


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Accept a size of 1. Raises UsageError for others."""
    if sequence_parallel_size != 1:
        raise UsageError(
            f"sequence_parallel_size is {sequence_parallel_size}: pass 1, or {SEQUENCE} in the model, and pass "
            "process_group to infinity.initialize()"
        )


def get_sequence_parallel_world_size() -> int:
    return 1


def get_sequence_parallel_rank() -> int:
    return 0


def get_sequence_data_parallel_world_size() -> int:
    return get_world_size()


def get_sequence_data_parallel_rank() -> int:
    return get_rank()

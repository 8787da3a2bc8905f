"""Conditions of the smoke test: states are in the tiers of their configuration, and operations are deterministic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from infinity.plan.placement import State
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.engine.training import TrainingEngine


@contextmanager
def deterministic() -> Iterator[None]:
    """Make operations deterministic; those that cannot be raise. CUDA must not have been used before.

    cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it starts. The backward of fused attention may add in any order, so
    attention is computed by its formula.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def misplaced(engine: TrainingEngine) -> Iterator[str]:
    """Yield a line for each kind of state that is elsewhere than `offload_param` and `offload_optimizer` place it, and
    for each tier that has not reserved the bytes of its states.
    """
    zero, placement, reserved = engine.config.zero_optimization, engine.parts.plan.placement, engine.ledger.tier_bytes()
    kinds = {
        State.PARAM: ("parameters", TierKind.of_config(zero.offload_param.device)),
        State.OPTIM: ("optimizer states", TierKind.of_config(zero.offload_optimizer.device)),
    }
    for state, (name, wanted) in kinds.items():
        if (found := placement.tiers(state)) != {wanted}:
            yield f"{name} are on {' and '.join(sorted(found))}, not on {wanted}"
    for tier in TierKind:
        states = [extent for (_, state), extent in placement.extents.items() if state in kinds and extent.tier == tier]
        needed = sum(extent.nbytes for extent in states)
        if reserved[tier] < needed:
            yield f"{tier} has reserved {reserved[tier]:,} bytes for states of {needed:,}"

"""Code of the ranks in test_profile.py."""

from __future__ import annotations

from pathlib import Path

import infinity
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.models import Stack, seeded


def profiled(rank: int, *, folder: str) -> dict[str, int]:
    """Profile two steps; return the bytes that this rank counts."""
    config = engine_config(folder=folder, unit_size=4096, update="after_backward", micro=SAMPLES, clip=1.0)
    engine, *_ = infinity.initialize(model=seeded(Stack), config=config)
    batches = global_batches(3, SAMPLES * 2)
    for number, batch in enumerate(batches):
        if number == 1:
            engine.settle()
            before = engine.ledger.snapshot()
            engine.profile(2, Path(folder) / "trace.json")
        loss = engine(*part(batch, rank))
        engine.backward(loss)
        engine.step()
    engine.settle()
    moved = engine.ledger.snapshot() - before
    engine.close()
    return {
        "nvme_read": moved.nvme_bytes_read,
        "nvme_write": moved.nvme_bytes_written,
        "gather": moved.all_gather_bytes,
        "reduce": moved.reduce_scatter_bytes,
    }

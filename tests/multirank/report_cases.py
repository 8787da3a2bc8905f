"""Code of the ranks in test_reports.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infinity
from multirank.cases import SAMPLES, global_batches, part
from support.models import Stack, seeded


def reported(rank: int, *, folder: str) -> dict[str, Any]:
    """Train two steps of two micro-batches with a folder of reports for each rank; return losses, files and rows."""
    own = Path(folder) / str(rank)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "csv_monitor": {"enabled": True, "output_path": str(own), "job_name": "run"},
        "flops_profiler": {"enabled": True, "output_file": str(own / "flops")},
        "wall_clock_breakdown": rank == 0,
    }
    engine, *_ = infinity.initialize(model=seeded(Stack), config=config)
    losses = []
    for batch in global_batches(4, SAMPLES * 2):
        loss = engine(*part(batch, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    files = sorted(path.name for path in own.rglob("*.csv")) + [path.name for path in own.glob("flops")]
    written = own / "run" / "Train_Samples_train_loss.csv"
    return {"losses": losses, "files": files, "rows": written.read_text().split() if rank == 0 else []}

"""Reports on two ranks: rank 0 writes them, and samples are those of all ranks."""

from __future__ import annotations

from pathlib import Path

from multirank import report_cases
from multirank.cases import SAMPLES
from support.ranks import Group


def test_rank_0_reports_its_losses_and_the_samples_of_all_ranks(pair: Group, tmp_path: Path) -> None:
    """Settings of reports may differ between ranks, as those of the clock do here."""
    first, second = pair.run(report_cases.reported, folder=str(tmp_path))
    losses = first["losses"]
    means = [losses[at] / 2 + losses[at + 1] / 2 for at in (0, 2)]
    assert first["rows"] == ["step,train_loss", *(f"{4 * SAMPLES * n},{mean}" for n, mean in enumerate(means, 1))]
    assert first["files"] == [
        *(f"Train_Samples_elapsed_time_ms_{phase}.csv" for phase in ("backward", "forward", "step")),
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
        "flops",
    ]
    assert second["files"] == [] and not (tmp_path / "1").exists()
    assert second["losses"] != losses

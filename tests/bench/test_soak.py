"""The soak finds what grows, and trainings of 2,500 steps grow nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from report import soak as report

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ["--hidden", "32", "--layers", "2", "--heads", "2", "--vocab", "64", "--sequence", "16", "--batch", "1"]
CALM = {"count": 100, "p50": 0.01, "p99": 0.012}


def result(grow: str = "", per_step: float = 0.0, noise: float = 0.0) -> dict[str, Any]:
    """Return a run of 10,000 steps whose resources are flat but for one."""
    draw = random.Random(0)
    samples = []
    for number in range(1, 101):
        sample = {"step": 100.0 * number, "seconds": number, **dict.fromkeys(report.RESOURCES, 1e8)}
        sample["rss"] += noise * draw.random() + (5e7 if number < 10 else 0)
        if grow:
            sample[grow] += per_step * sample["step"]
        samples.append(sample)
    return {"runs": {"kind": {"samples": samples, "calm": CALM, "beside_save": CALM}}}


def test_flat_resources_have_no_excess() -> None:
    """Noise of 20 MB, and a start that takes more, are no growth."""
    assert report.excesses(result(noise=2e7)) == []


@pytest.mark.parametrize(
    ("name", "per_step"),
    [("rss", 2e3), ("heap", 40), ("python_objects", 0.25), ("descriptors", 1e-3), ("threads", 1e-3), ("disk", 1)],
)
def test_slow_growth_is_found(name: str, per_step: float) -> None:
    """A descriptor in a thousand steps, an object in four, and 40 bytes a step are found."""
    (problem,) = report.excesses(result(name, per_step, noise=1e6))
    assert problem.startswith(f"kind: {report.RESOURCES[name].title} grew by ")


def test_one_outlier_is_no_slope() -> None:
    assert report.slope([(0, 1), (1, 1), (2, 900), (3, 1), (4, 1)]) == 0
    assert report.slope([(0, 0), (1, 2), (2, 4), (3, 70), (4, 8)]) == 2
    assert report.slope([(1, 1)]) == 0


@pytest.mark.campaign  # a minute
@pytest.mark.timeout(600)
def test_thousands_of_steps_grow_nothing(tmp_path: Path) -> None:
    """States on nvme with checkpoints in the background and evaluations: 500 steps of each configuration."""
    flags = [
        "--steps",
        "500",
        "--cycle",
        "10",
        "--threads",
        "1",
        "--nvme-path",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, str(BENCH / "soak.py"), *TINY, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert [run["samples"][-1]["step"] for run in found["runs"].values()] == [500] * 5
    assert all(run["samples"][-1]["disk"] > 0 for run in found["runs"].values())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("infinity-soak")] == []

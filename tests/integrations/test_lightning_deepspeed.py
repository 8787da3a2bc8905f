"""Lightning's own DeepSpeedStrategy(stage=3), over infinity.deepspeed, gives the results of its DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="make test-integrations installs it")

from infinity.deepspeed.substitute import substituted_environment

pytestmark = pytest.mark.integrations

SCRIPT = Path(__file__).with_name("lightning_deepspeed_script.py")
PARAMETERS, TENSORS = 833, 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_fits_tests_and_resumes_as_ddp(ranks: int, tmp_path: Path) -> None:
    """Losses, scores of the model and of its checkpoint, losses after that, and the sizes of the model's summary."""
    folders = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    environ = substituted_environment({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    for strategy in ("ddp", "deepspeed"):
        command = [*torchrun, str(SCRIPT), strategy, str(tmp_path), str(ranks)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
        assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(ranks):
        plain, ours = (torch.load(tmp_path / f"{strategy}{rank}.pt") for strategy in ("ddp", "deepspeed"))
        total, trainable, of_rank = ours.pop("sizes")
        assert (total, trainable) == (PARAMETERS, PARAMETERS)
        assert PARAMETERS <= of_rank * ranks < PARAMETERS + TENSORS * ranks
        for name, value in plain.items():
            assert ours[name] == pytest.approx(value, rel=1e-4), name
        assert len(ours["resumed"]) == len(ours["losses"])
        assert ours["tested"] == pytest.approx(ours["loaded"], rel=1e-6)

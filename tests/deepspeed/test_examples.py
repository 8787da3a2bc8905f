"""The tutorials in examples/deepspeed/ run as they are, on one rank and on two, and their losses fall."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.campaign(few=1)

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"
CIFAR = [str(EXAMPLES / "cifar10.py"), "--deepspeed", "--deepspeed_config", str(EXAMPLES / "cifar10.json")]


def run(arguments: list[str], folder: Path, ranks: int = 1) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([0-9.]+)", output, re.MULTILINE)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_linear_tutorial_trains(ranks: int, tmp_path: Path) -> None:
    """The loss falls to a fraction, and rank 0 alone prints it."""
    fell = losses(run([str(EXAMPLES / "linear.py")], tmp_path, ranks))
    assert len(fell) == 5
    assert fell[-1] < 0.2 * fell[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cifar_tutorial_learns_made_images(ranks: int, tmp_path: Path) -> None:
    """A network learns ten colours; the test set's accuracy is that of most images. Rank 0 alone prints."""
    output = run(CIFAR, tmp_path, ranks)
    assert len(losses(output)) == 3
    assert int(re.findall(r"accuracy (\d+) %", output)[-1]) > 60


def test_the_cifar_tutorial_reads_the_real_sets_format(tmp_path: Path) -> None:
    """Files like those of the data set's Python version are read, five to train and one to test."""
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        content = {b"data": torch.randint(0, 256, (20, 3072), dtype=torch.uint8).numpy(), b"labels": [1] * 20}
        (tmp_path / name).write_bytes(pickle.dumps(content))
    output = run([*CIFAR, "--data", str(tmp_path), "--epochs", "1"], tmp_path)
    assert len(losses(output)) == 1

"""A part of tests/gpu passes on the late device, so that errors in those tests show without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "files, chosen",
    [
        ("test_bits", "AdamW-fp32-clipped-2 or share-bf16-remainder or budget-fp16-clipped"),
        ("test_cuda test_cuda_adam", "none-none or nvme-cpu or schedules or fused or norm or one_rank or halves"),
        ("test_streams", "outside or cpu-none-0.5 or prefetch or nvme-nvme-next_forward or fp16 or batches_in"),
    ],
)
def test_tests_of_a_gpu_pass(files: str, chosen: str) -> None:
    paths = [f"tests/gpu/{name}.py" for name in files.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-k", chosen, *paths]
    environment = {**os.environ, "INFINITY_TEST_DEVICE": "late"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr

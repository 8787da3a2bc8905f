"""examples/huggingface/trainer.py trains, with and without adapters, and leaves nothing on nvme."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("transformers", "accelerate", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

pytestmark = pytest.mark.integrations
SCRIPT = Path(__file__).parents[2] / "examples" / "huggingface" / "trainer.py"


@pytest.mark.parametrize("options", [[], ["--lora"]], ids=["full", "lora"])
def test_the_example_trains(options: list[str], tmp_path: Path) -> None:
    nvme, out = tmp_path / "nvme", tmp_path / "out"
    command = [sys.executable, "-m", "infinity.cli.main", "run", str(SCRIPT), *options, "--steps", "12"]
    command += ["--nvme-path", str(nvme), "--output", str(out)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=150)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert done.returncode == 0 and len(losses) == 12, done.stdout + done.stderr
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    assert list(nvme.iterdir()) == []
    assert (out / ("adapter_model.safetensors" if options else "model.safetensors")).is_file()

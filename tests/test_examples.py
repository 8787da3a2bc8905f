"""The scripts in examples/ run as they are, and their losses fall."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150
    )


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]


@pytest.mark.parametrize("name", ["plain_module", "hugging_face"])
def test_an_example_trains_on_nvme_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Examples print one loss a step; states live in the folder that --nvme-path names, without a trace at the end."""
    if name == "hugging_face":
        pytest.importorskip("transformers")
    script = str(ROOT / "examples" / f"{name}.py")
    result = run([script, "--steps", "12", "--nvme-path", str(tmp_path)], tmp_path)
    assert result.returncode == 0, result.stdout
    fell = losses(result.stdout)
    assert len(fell) == 12, result.stdout
    assert sum(fell[-3:]) < 0.8 * sum(fell[:3])
    assert "nvme" in result.stdout
    assert list(tmp_path.iterdir()) == []

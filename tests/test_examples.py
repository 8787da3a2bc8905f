"""The scripts in examples/ and the first Python code in README.md run as they are, and their losses fall."""

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


@pytest.mark.campaign
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


def test_the_first_code_in_the_readme_trains(tmp_path: Path) -> None:
    """README's first Python block is a whole program; the engine's own lines of progress show its loss."""
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    result = run(["-c", code], tmp_path)
    assert result.returncode == 0, result.stdout
    shown = [float(loss) for loss in re.findall(r"\[infinity\] step \d+: loss ([0-9.e+-]+)", result.stdout)]
    assert len(shown) == 2, result.stdout
    assert shown[1] < 0.8 * shown[0]
    assert list(tmp_path.iterdir()) == []

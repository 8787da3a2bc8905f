"""The scripts in examples/huggingface/ and the code of docs/huggingface.md train, and leave nothing on nvme."""

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
EXAMPLES = Path(__file__).parents[2] / "examples" / "huggingface"


def run(script: str, folder: Path, *options: str, ranks: int = 1) -> str:
    """Run a script with its states in `folder`/nvme, and return its output."""
    launcher = ["run"] + (["--num_gpus", str(ranks)] if ranks > 1 else [])
    command = [sys.executable, "-m", "infinity.cli.main", *launcher, str(EXAMPLES / script)]
    (folder / "nvme").mkdir()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--nvme-path", str(folder / "nvme"), *options],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    assert list((folder / "nvme").iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("options", [[], ["--lora"]], ids=["full", "lora"])
def test_the_trainer_trains(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = run("trainer.py", tmp_path, *options, "--steps", "12", "--output", str(out))
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert len(losses) == 12, output
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    assert output.count("this rank holds ") == 1, "Trainer shows warnings, and the engine's summary"
    assert (out / ("adapter_model.safetensors" if options else "model.safetensors")).is_file()


@pytest.mark.parametrize("ranks", [1, 2])
def test_lora_checkpoints_leave_the_base_out(ranks: int, tmp_path: Path) -> None:
    """A run from the base and the checkpoint has the loss of the run that saved it."""
    output = run("lora.py", tmp_path, "--output", str(tmp_path / "out"), ranks=ranks)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0], output
    base, checkpoint = re.search(r"base ([\d,]+) bytes, checkpoint ([\d,]+) bytes", output).groups()
    assert int(checkpoint.replace(",", "")) < 0.5 * int(base.replace(",", ""))
    trained, again = re.search(r"loss ([\d.]+), from the checkpoint ([\d.]+)", output).groups()
    assert trained == again


def test_larger_than_memory_trains_below_its_limit(tmp_path: Path) -> None:
    output = run("larger_than_memory.py", tmp_path, "--steps", "6")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert len(losses) == 6 and losses[-1] < losses[0], output
    assert re.search(r"peak of resident memory: \d\.\d+ GiB, limit 3 GiB", output), output


def test_the_pages_code_runs(tmp_path: Path) -> None:
    """Its Python code with its config, started by `python`."""
    page = (EXAMPLES.parents[1] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (config,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "ds_config.json").write_text(config.replace("/local_nvme", str(tmp_path / "nvme")))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train_loss" in done.stdout
    assert (tmp_path / "output" / "model.safetensors").is_file()

"""The commands of docs/front_ends.md for Trainer, TRL and Accelerate run as copied, and put states on NVMe.

Only `/local_nvme` and the number of steps differ from the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("accelerate", "bitsandbytes", "datasets", "peft", "transformers", "trl"):
    pytest.importorskip(library, reason="make test-integrations installs it")

pytestmark = pytest.mark.integrations
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "front_ends.md").read_text(encoding="utf-8")
TRAINER = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
PROGRAMS = {"infinity": "-m infinity.cli.main", "trl": "-m trl.cli.main"}
VARIABLES = [f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_NVME_PATH" for kind in ("PARAM", "OPTIMIZER")]
LOOP = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.arange(6 * 32).view(6, 32), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": str(loss.item())})
if accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"][
    "stage3_gather_16bit_weights_on_model_save"
]:
    assert len(accelerator.get_state_dict(model)) == 39
"""


def section(title: str, page: str = PAGE) -> str:
    return re.split(r"^#+ ", page.partition(f"# {title}\n")[2], maxsplit=1, flags=re.M)[0]


def fenced(text: str, kind: str = "") -> str:
    """Return the first block of this kind."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return str(next(code for found, code in blocks if found == kind))


def row(start: str) -> str:
    """Return the command of the row of the table that begins so."""
    found = re.search(rf"^\| {re.escape(start)} \|[^|]*\| `([^`]+)`", PAGE, re.M)
    assert found, start
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the model, the data and the files that the commands name."""
    (tmp_path / "bin").mkdir()
    for name, arguments in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "ds_config.json").write_text(fenced(TRAINER, "json").replace("/local_nvme", str(tmp_path / "nvme")))
    (tmp_path / "zero3_nvme.yaml").write_text(fenced(section("SFT"), "yaml"))
    shell(fenced(section("Try them")), tmp_path)
    return tmp_path


def shell(command: str, folder: Path) -> str:
    """Return the output of a shell in `folder`."""
    command = command.replace("/local_nvme", str(folder / "nvme")).replace("--max_steps 100", "--max_steps 3")
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "CLONE": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", command], env=os.environ | own | path, cwd=folder, text=True, capture_output=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check(output: str, folder: Path, on_nvme: bool = True) -> None:
    """Three steps ran, with states where the page says, and their files are gone."""
    assert len(re.findall(r"'loss': '[^']+'", output)) == 3, output
    assert ("0 B on nvme" not in output) == on_nvme and "on nvme" in output, output
    assert not on_nvme or list((folder / "nvme").iterdir()) == []
    assert not (folder / "none").exists()


@pytest.mark.parametrize("title", ["SFT", "QLoRA", "DPO and KTO", "GRPO and RLOO"])
def test_commands_of_trl(title: str, folder: Path) -> None:
    check(shell(fenced(section(title)), folder), folder)


def test_zero3_of_trl_offloads_nothing(folder: Path) -> None:
    command = fenced(section("SFT")).replace("zero3_nvme.yaml", "zero3")
    check(shell(command, folder), folder, on_nvme=False)


def test_accelerate_launch(folder: Path) -> None:
    (folder / "train.py").write_text(LOOP)
    check(shell(fenced(section("Accelerate")), folder), folder)
    check(shell(row("`accelerate launch`"), folder), folder, on_nvme=False)


def test_options_that_accelerate_ignores_are_an_error(folder: Path) -> None:
    """Its option of the folder without the variables: the error names these, and no folder `none` is made."""
    (folder / "train.py").write_text(LOOP)
    options = "--offload_param_nvme_path /local_nvme --offload_optimizer_nvme_path /local_nvme train.py"
    command = re.sub("^export .*\n", "", fenced(section("Accelerate")), flags=re.M).replace("train.py", options)
    output = shell(f"unset {' '.join(VARIABLES)}; ! {command}", folder)
    assert "'loss'" not in output and all(name in output for name in VARIABLES), output
    assert not (folder / "none").exists()


def test_trainer(folder: Path) -> None:
    """The script of docs/huggingface.md under the command of the table."""
    (folder / "train.py").write_text(fenced(TRAINER, "python").replace("max_steps=10", "max_steps=3, logging_steps=1"))
    check(shell(row("a script with transformers' Trainer"), folder), folder)

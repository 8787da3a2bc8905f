"""The scripts of examples/finetune/, which docs/finetune.md shows, train, and leave nothing on nvme."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for library in ("bitsandbytes", "datasets", "peft", "transformers", "trl"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

pytestmark = pytest.mark.integrations
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "finetune"
KEPT = "error:something still refers to the parameters of unit"


def start(command: list[str], folder: Path) -> str:
    """Return what the command prints, which keeps no buffer of a unit."""
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | own | {"PYTHONWARNINGS": KEPT},
        cwd=folder,
        text=True,
        capture_output=True,  # apart, since bars of progress would cut lines in two
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    start([str(EXAMPLES / "toy.py"), str(folder)], folder)
    return folder


def train(script: str, toy: Path, folder: Path, data: str, *options: str) -> str:
    """Run a script with its states in `folder`/nvme and its result in `folder`/out, and return its output."""
    launcher = [] if "import infinity\n" in (EXAMPLES / script).read_text() else ["-m", "infinity.cli.main", "run"]
    (folder / "nvme").mkdir()
    places = ["--model", str(toy / "model"), "--data", str(toy / f"{data}.jsonl"), "--output", str(folder / "out")]
    output = start([*launcher, str(EXAMPLES / script), *places, "--nvme-path", str(folder / "nvme"), *options], folder)
    assert list((folder / "nvme").iterdir()) == []
    return output


def losses(output: str) -> list[float]:
    """Return the losses that a loop or Trainer prints."""
    return [
        float(loss)
        for loss in re.findall(r"^step \d+: loss (\S+)|'loss': '([^']+)'", output, re.M)
        for loss in loss
        if loss
    ]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(1, 17)[None]).logits
    return found


@pytest.mark.parametrize("script", ["qlora.py", "qlora_sft.py"])
def test_qlora(script: str, toy: Path, tmp_path: Path) -> None:
    """The adapter changes the base over which it is loaded."""
    output = train(script, toy, tmp_path, "texts", "--steps", "20", "--lr", "1e-2")
    found = losses(output)
    assert len(found) == 20 and sum(found[-3:]) < 0.95 * sum(found[:3]), output
    model = AutoModelForCausalLM.from_pretrained(toy / "model")
    base = logits(model)
    adapted = logits(PeftModel.from_pretrained(model, tmp_path / "out"))
    assert (adapted - base).abs().max() > 0.1


def test_long_context(toy: Path, tmp_path: Path) -> None:
    """Neither chunks nor the place of activations change a loss; the saved folder loads with its tokenizer."""
    found = {}
    for rows, place in ((100, "nvme"), (100, "none"), (256, "none")):
        folder = tmp_path / f"{place}{rows}"
        folder.mkdir()
        options = ("--length", "256", "--rows", str(rows), "--activations", place, "--steps", "8", "--lr", "1e-3")
        found[place, rows] = losses(train("long_context.py", toy, folder, "texts", *options))
    first, second, whole = found.values()
    assert len(first) == 8 and first[-1] < 0.9 * first[0], found
    assert first == second
    assert first == pytest.approx(whole, rel=1e-2)
    saved = tmp_path / "nvme100" / "out"
    model, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(saved).decode(model.generate(torch.ones(1, 1, dtype=torch.int64))[0])


def test_dpo(toy: Path, tmp_path: Path) -> None:
    """The margin between chosen and rejected grows from zero, since policy and reference begin as one model."""
    output = train("dpo.py", toy, tmp_path, "pairs", "--steps", "8", "--lr", "1e-3")
    margins = [float(margin) for margin in re.findall(r"'rewards/margins': '([^']+)'", output)]
    assert len(margins) == 8 and margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0.1, output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_grpo(toy: Path, tmp_path: Path) -> None:
    output = train("grpo.py", toy, tmp_path, "prompts", "--steps", "4", "--tokens", "8", "--lr", "1e-3")
    assert len(re.findall(r"'rewards/lowercase/mean'", output)) == 4, output
    trained = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    assert not torch.equal(trained, logits(AutoModelForCausalLM.from_pretrained(toy / "model")))


def test_the_page_shows_the_scripts() -> None:
    """Each Python block of the page is in the script that the section links first, and each script is linked."""
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(\.\./examples/finetune/(\w+\.py)\)", page))
    assert linked == {path.name for path in EXAMPLES.glob("*.py")}
    shown = 0
    for section in page.split("\n## ")[1:]:
        for code in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
            script = EXAMPLES / re.search(r"examples/finetune/(\w+\.py)", section)[1]  # type: ignore[index]
            text = script.read_text(encoding="utf-8")
            for part in code.split("    ...\n"):
                assert part in text, f"{script.name} has no such lines:\n{part}"
            shown += 1
    assert shown

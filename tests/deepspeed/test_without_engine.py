"""The line at the exit of a script that took optimizer steps without an engine, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

ROOT = str(Path(infinity.__file__).parents[1])
LINE = (
    "[infinity] {} took {} without an engine: plain PyTorch trained. Call deepspeed.initialize, or pass the config to "
    "Trainer (--deepspeed CONFIG) or to Accelerator (DeepSpeedPlugin)."
)

PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def steps(number, step=optimizer.step):
    for _ in range(number):
        model(torch.ones(1, 4)).sum().backward()
        step()
"""
ENGINE = """
import deepspeed
driven = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine = deepspeed.initialize(model=driven, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.destroy()
"""


def notes(folder: Path, text: str, *, status: int = 0, start: tuple[str, ...] = ("infinity.deepspeed",)) -> list[str]:
    """Run `text` as train.py in place of DeepSpeed, and return the lines at its exit."""
    script = folder / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *start, str(script)],
        env={**os.environ, "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return [line for line in done.stderr.splitlines() if "without an engine" in line]


def test_steps_of_a_plain_loop_are_counted(tmp_path: Path) -> None:
    """Compiled steps too. sys.exit(0) is a normal end."""
    compiled = 'steps(2)\nsteps(3, torch.compile(optimizer.step, backend="eager"))\nimport sys\nsys.exit(0)\n'
    assert notes(tmp_path, PLAIN + compiled) == [LINE.format("train.py", "5 optimizer steps")]


def test_one_of_two_ranks_prints_the_line(tmp_path: Path) -> None:
    start = ("infinity.cli.main", "run", "--num_gpus", "2")
    assert notes(tmp_path, PLAIN + "steps(1)\n", start=start) == [LINE.format("train.py", "1 optimizer step")]


def test_a_child_without_an_engine_prints_the_line(tmp_path: Path) -> None:
    """A child as of `accelerate launch`, which takes no steps itself."""
    (tmp_path / "child.py").write_text(PLAIN + "steps(2)\n")
    parent = "import os, subprocess, sys\nfrom torch import nn\n"
    parent += "subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), 'child.py')], check=True)\n"
    assert notes(tmp_path, parent) == [LINE.format("child.py", "2 optimizer steps")]


@pytest.mark.parametrize(
    "after",
    [
        "steps(1)\n" + ENGINE,
        ENGINE + "import subprocess, sys\nsubprocess.run([sys.executable, '-c', code], check=True)\nsteps(1)\n",
        "import infinity\ninfinity.init_inference(model, {}).close(restore=True)\nsteps(1)\n",
    ],
    ids=["after steps", "before steps and a child", "for inference"],
)
def test_an_engine_prevents_the_line(after: str, tmp_path: Path) -> None:
    assert notes(tmp_path, f"code = {PLAIN + 'steps(1)'!r}\n{PLAIN}{after}") == []


def test_a_parent_whose_child_has_the_engine_prints_nothing(tmp_path: Path) -> None:
    parent = f"import subprocess, sys\nfrom torch import nn\ncode = {PLAIN + ENGINE!r}\n"
    assert notes(tmp_path, parent + "subprocess.run([sys.executable, '-c', code], check=True)\n") == []


def test_a_script_without_steps_prints_nothing(tmp_path: Path) -> None:
    """Its import of torch imports no compiler."""
    assert notes(tmp_path, "import sys, torch\nassert 'torch._dynamo' not in sys.modules\n") == []


def test_a_script_that_raises_prints_nothing(tmp_path: Path) -> None:
    assert notes(tmp_path, PLAIN + "steps(1)\nraise ValueError\n", status=1) == []


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_of_multiprocessing_print_nothing(start: str, tmp_path: Path) -> None:
    children = f"""
if __name__ == "__main__":
    child = torch.multiprocessing.get_context({start!r}).Process(target=steps, args=(1,))
    child.start()
    child.join()
    assert child.exitcode == 0
"""
    text = PLAIN.replace(", step=optimizer.step", "").replace("        step()", "        optimizer.step()")
    assert notes(tmp_path, text + children) == []


def test_a_forked_child_that_exits_prints_nothing(tmp_path: Path) -> None:
    fork = "import os\nif os.fork() == 0:\n    steps(1)\nelse:\n    assert os.wait()[1] == 0\n"
    assert notes(tmp_path, PLAIN + fork) == []


def test_torch_is_imported_where_infinity_is_not(tmp_path: Path) -> None:
    """A child may run another Python."""
    assert notes(tmp_path, f"import sys\nsys.modules['infinity'] = None\n{PLAIN}steps(1)\n") == []

"""Lightning's own conversion of DeepSpeed checkpoints converts those of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch", reason="make test-integrations installs it")

pytestmark = pytest.mark.integrations

TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys
from pathlib import Path

import deepspeed
import torch
from integrations.lightning_module import Regression, loader, module, trainer
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

folder = Path(sys.argv[1])
model = module()
runner = trainer(folder, max_epochs=1)
runner.fit(model, loader())
state = runner._checkpoint_connector.dump_checkpoint(weights_only=False)
for name in ("state_dict", "optimizer_states", "lr_schedulers"):  # as DeepSpeedStrategy.save_checkpoint
    state.pop(name)
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": int(sys.argv[2])}}
expected = {name: value.clone() for name, value in model.state_dict().items()}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.save_checkpoint(folder / "saved", client_state=state, tag="checkpoint")
convert_zero_checkpoint_to_fp32_state_dict(folder / "saved", folder / "whole.ckpt")
loaded = Regression.load_from_checkpoint(folder / "whole.ckpt")
assert loaded.state_dict().keys() == expected.keys()
assert all(torch.equal(loaded.state_dict()[name], value) for name, value in expected.items())
written = torch.load(folder / "whole.ckpt", weights_only=False)
assert written["epoch"] == state["epoch"] and written["global_step"] == 12
print("converted")
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_becomes_lightnings(stage: int, tmp_path: Path) -> None:
    """`load_from_checkpoint` reads the result, which has the values of the model and Lightning's state."""
    script = tmp_path / "convert.py"
    script.write_text(SCRIPT)
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "infinity.deepspeed", str(script), str(tmp_path), str(stage)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0 and run.stdout.endswith("converted\n"), run.stderr[-3000:]

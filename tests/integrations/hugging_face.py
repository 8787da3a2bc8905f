"""A small model, its data, and scripts whose functions are cases: `SCRIPT OUT CASE ...` writes OUT/results<rank>.json.

A case that fails leaves its traceback, and the next one runs. One process runs many cases, since each start imports
for seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

SUBSTITUTED = (sys.executable, "-m", "infinity.deepspeed")
ONE_RANK, TWO_RANKS = (
    (sys.executable, "-m", "infinity.cli.main", "run", "--num_gpus", ranks, "--no_local_rank") for ranks in ("1", "2")
)


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens, in which each is the last plus a constant."""
    generator = torch.Generator().manual_seed(seed)
    start, by = torch.randint(32, (count, 1), generator=generator), torch.randint(1, 4, (count, 1), generator=generator)
    tokens = (start + by * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2() -> nn.Module:
    """A GPT-2 of two layers with tied embeddings, the same at each call."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))
    return model


def run_cases(functions: Mapping[str, Any]) -> None:
    """Run the functions that the command line names, and write what they return."""
    torch.set_num_threads(1)
    out, results = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            results[name] = functions[name](folder)
        except Exception:  # noqa: BLE001 - the test of the case shows it
            results[name] = traceback.format_exc()
    (out / f"results{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))


def measure(script: str, folder: Path, *cases: str, launcher: tuple[str, ...] = SUBSTITUTED) -> list[dict[str, Any]]:
    """Run cases of a script in this folder, and return the results of each rank."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(Path(__file__).with_name(script)), str(folder), *cases]
    done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=170)
    files = sorted(folder.glob("results*.json"))
    assert done.returncode == 0 and files, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in files]

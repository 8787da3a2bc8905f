"""One run of `quality.py`: a GPT-2 trained with one format of optimizer states, in the engine or by hand."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import infinity
import training
from gpt2.data import TokenDataset, load_corpus
from infinity.config import Config
from infinity.engine.schedules.client import make_scheduler
from infinity.sim.gpt2 import GPT2
from quality_recipe import FORMATS, Recipe

MEASUREMENTS = 10
"""How often a run measures its held-out loss."""
Run = dict[str, Any]


class EngineLoop:
    """Training in the engine."""

    def __init__(self, model: GPT2, config: Config) -> None:
        self.engine, *_ = infinity.initialize(model, config)

    def learn(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        return float(self.engine(inputs, targets).item())

    def fingerprint(self) -> str:
        """Return the SHA-256 of a checkpoint: the exact fp32 values of all parameters, and their moments."""
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory() as folder:
            path = self.engine.save_checkpoint(folder)
            for file in sorted(path.glob("unit-*.safetensors")):
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.engine.close()


class PlainLoop:
    """The same by hand: a bf16 model, fp32 masters, torch's fused AdamW, clipping and cast."""

    def __init__(self, model: GPT2, config: Config) -> None:
        params = config.optimizer.params.model_dump()
        self.masters = training.Masters(model)
        self.optimizer = torch.optim.AdamW(self.masters.values, **params, fused=True)
        self.schedule = make_scheduler(self.optimizer, config.scheduler, params["lr"])
        self.clip = config.gradient_clipping
        self.model = model

    def learn(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.model(inputs, targets)
        loss.backward()
        self.masters.take_gradients()
        torch.nn.utils.clip_grad_norm_(self.masters.values, self.clip)
        self.optimizer.step()
        assert self.schedule is not None
        self.schedule.step()
        self.masters.write_back()
        return float(loss.item())

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        return float(self.model(inputs, targets).item())

    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(master.detach().numpy().tobytes() for master in self.masters.values)).hexdigest()

    def close(self) -> None:
        pass


def train(recipe: Recipe, name: str, seed: int) -> Run:
    """One run: its training losses, held-out losses as (step, loss), and what it took."""
    kind, corpus = FORMATS[name], load_corpus()
    text = TokenDataset(corpus.train, recipe.sequence, seed)
    held_out = TokenDataset(corpus.held_out, recipe.sequence).spread(recipe.held_out_windows)
    torch.manual_seed(seed)
    loop = (EngineLoop if kind.in_engine else PlainLoop)(GPT2(recipe.shape), recipe.config(kind, seed))
    began, cpu_began = time.perf_counter(), time.process_time()
    losses: list[float] = []
    measured: list[tuple[int, float]] = []
    between = max(1, recipe.steps // MEASUREMENTS)
    for step in range(1, recipe.steps + 1):
        losses.append(loop.learn(*text.batch((step - 1) * recipe.batch, recipe.batch)))
        if step % between == 0 or step == recipe.steps:
            measured.append((step, measure(loop, held_out)))
            print(f"{name:>9}, seed {seed}: step {step:4}, held-out loss {measured[-1][1]:.4f}", file=sys.stderr)
    run = {
        "format": name,
        "seed": seed,
        "losses": [float(str(np.float32(loss))) for loss in losses],  # the fewest digits that are this fp32 value
        "held_out": measured,
        "fingerprint": loop.fingerprint(),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
    }
    loop.close()
    return run


@torch.no_grad()
def measure(loop: EngineLoop | PlainLoop, held_out: tuple[Tensor, Tensor], rows: int = 32) -> float:
    """Mean loss over the windows, in nats; all runs measure the same ones."""
    parts = list(zip(*(half.split(rows) for half in held_out), strict=True))
    return sum(loop.loss(inputs, targets) * len(inputs) for inputs, targets in parts) / len(held_out[0])


def traffic(recipe: Recipe, name: str, steps: int = 3) -> float:
    """Bytes of optimizer state that a step reads and writes, per parameter: measured with the states on NVMe, without
    clipping, whose waiting gradients would be counted too.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.config(FORMATS[name], 0, {"device": "nvme", "nvme_path": folder})
        loop = EngineLoop(GPT2(recipe.shape), config.model_copy(update={"gradient_clipping": 0.0}))
        tokens = torch.zeros(recipe.batch, recipe.sequence, dtype=torch.int64)
        loop.learn(tokens, tokens)
        loop.engine.settle()
        before = loop.engine.ledger.snapshot()
        for _ in range(steps):
            loop.learn(tokens, tokens)
        loop.engine.settle()
        moved = loop.engine.ledger.snapshot() - before
        loop.close()
    return (moved.nvme_bytes_read + moved.nvme_bytes_written) / steps / recipe.shape.num_parameters

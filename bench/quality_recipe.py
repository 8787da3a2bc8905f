"""The recipe that the runs of `quality.py` share, and the formats that they compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import training
from gpt2.data import VOCAB_SIZE
from infinity.config import Config
from infinity.plan.formats import MasterFormat, state_format
from infinity.rules import MomentFormat
from infinity.sim.gpt2 import GPT2Config


@dataclass(frozen=True)
class Format:
    """How a run keeps its parameters and optimizer states."""

    title: str
    dtype: torch.dtype = torch.bfloat16
    master: MasterFormat = "remainder"
    moments: MomentFormat = "fp32"
    in_engine: bool = True

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer states per parameter, without the parameter itself."""
        return state_format(self.dtype, self.master, "adamw", self.moments).bytes_per_element


FORMATS = {
    "reference": Format("fp32 master, fp32 moments", master="fp32"),
    "remainder": Format("remainder, fp32 moments"),
    "bf16": Format("remainder, bf16 moments", moments="bf16"),
    "8bit": Format("remainder, 8-bit moments", moments="8bit"),
    "torch": Format("plain PyTorch, fp32 master and moments", master="fp32", in_engine=False),
    "fp32": Format("fp32 throughout", dtype=torch.float32),
}


@dataclass(frozen=True)
class Recipe:
    """Settings that all runs share."""

    steps: int = 800
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    lr: float = 1e-3
    held_out_windows: int = 512

    @property
    def shape(self) -> GPT2Config:
        return training.gpt2_config(
            hidden=self.hidden, layers=self.layers, heads=self.heads, vocab=VOCAB_SIZE, sequence=self.sequence
        )

    def config(self, kind: Format, seed: int, place: dict[str, str] | None = None) -> Config:
        """The engine's configuration. place: where optimizer states live."""
        schedule = {"total_num_steps": self.steps, "warmup_num_steps": self.steps // 10}
        return Config.load(
            {
                "steps_per_print": 0,
                "train_batch_size": self.batch,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": kind.dtype == torch.bfloat16},
                "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": schedule | {"warmup_type": "linear", "cos_min_ratio": 0.1},
                },
                "zero_optimization": {"stage": 3, "offload_optimizer": place or {"device": "cpu"}},
                "infinity": {"master": kind.master, "moments": kind.moments, "seed": seed, "adam_threads": 1},
            }
        )

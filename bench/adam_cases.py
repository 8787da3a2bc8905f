"""The cases of `adam.py` and `adam_cuda.py`: optimizer rules, formats of their arrays, bytes that each moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from infinity.plan.formats import BLOCK
from infinity.rules import RULES

HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
HYPER |= {"dampening": 0.0, "nesterov": False, "lr_decay": 0.0}
"""Constants of every rule."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GRADIENTS = {"fp32": "fp32", "remainder": "bf16", "master": "bf16", "master_fp16": "fp16"}
TITLES = {
    "fp32": "fp32",
    "remainder": "bf16 + remainder",
    "master": "bf16 + fp32 master",
    "master_fp16": "fp16 + fp32 master",
}
MASTERS = {"fp32": 0, "remainder": 2, "master": 4, "master_fp16": 4}
"""Bytes per parameter beside the parameter itself."""
TORCH = ("torch AdamW, fused", "torch AdamW, default")
PASSES_BYTES, TORCH_BYTES = 40, 28
"""Bytes per parameter: of convert, update and cast in three passes; of torch's AdamW in fp32, if it were one pass."""


@dataclass(frozen=True)
class Case:
    """A rule, the format of parameters and masters, and the format of moments."""

    rule: Any
    format: Any
    moments: Any

    @property
    def gradient(self) -> Any:
        return GRADIENTS[self.format]

    @property
    def name(self) -> str:
        return f"{self.rule} | {TITLES[self.format]} | {self.gradient} | {self.moments}"

    def streams(self) -> dict[str, tuple[float, bool]]:
        """Bytes per parameter of each array, and whether the update writes it."""
        width = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0}[self.moments]
        arrays: dict[str, tuple[float, bool]] = {"param": (4 if self.format == "fp32" else 2, True)}
        if MASTERS[self.format]:
            arrays["master"] = (MASTERS[self.format], True)
        arrays["grad"] = (DTYPES[self.gradient].itemsize, False)
        for k in range(len(RULES[self.rule].moments)):
            arrays[f"moment{k}"] = (width, True)
            if self.moments == "8bit":
                arrays[f"scale{k}"] = (1 / BLOCK, True)
        return arrays

    def bytes(self) -> float:
        """Read and written per parameter. Where there is a master, the parameter is written only."""
        total = sum(size * (2 if written else 1) for size, written in self.streams().values())
        return total - (2 if self.format.startswith("master") else 0)


CASES = [Case("adamw", format, moments) for format in TITLES for moments in ("fp32", "bf16", "8bit")]
CASES += [Case(rule, "remainder", "fp32") for rule in ("lion", "sgd", "adagrad")]

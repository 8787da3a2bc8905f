"""Resolves "auto" values from arguments and the model, for the keys that Accelerate and transformers' Trainer fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infinity.config.draft import ABSENT, drop, leaves, look, put


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Values for keys that are "auto"; None is unknown. Keys with a value of their own keep it."""

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    nvme_path: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    lr: float | None = None
    """Learning rate of the optimizer, and the highest rate of a schedule with a warm-up."""
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_min_lr: float = 0.0
    warmup_num_steps: int | None = None
    total_num_steps: int | None = None
    hidden_size: int | None = None
    """Width of the model; see `hidden_size_of`."""

    def values(self) -> dict[str, object]:
        """Return dotted key → value of everything known."""
        square = None if self.hidden_size is None else int(0.9 * self.hidden_size * self.hidden_size)
        known = {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization.stage": self.stage,
            "zero_optimization.offload_optimizer.device": self.offload_optimizer_device,
            "zero_optimization.offload_optimizer.nvme_path": self.nvme_path,
            "zero_optimization.offload_param.device": self.offload_param_device,
            "zero_optimization.offload_param.nvme_path": self.nvme_path,
            "bf16.enabled": self.bf16,
            "fp16.enabled": self.fp16,
            "optimizer.params.lr": self.lr,
            "optimizer.params.betas": None if self.betas is None else list(self.betas),
            "optimizer.params.eps": self.eps,
            "optimizer.params.weight_decay": self.weight_decay,
            "scheduler.params.warmup_min_lr": self.warmup_min_lr,
            "scheduler.params.warmup_max_lr": self.lr,
            "scheduler.params.warmup_num_steps": self.warmup_num_steps,
            "scheduler.params.total_num_steps": self.total_num_steps,
            "zero_optimization.stage3_prefetch_bucket_size": square,
        }
        return {key: value for key, value in known.items() if value is not None}


def hidden_size_of(model: Any) -> int | None:
    """Return the largest hidden size in `model.config`, as transformers' models have it; None without one."""
    for config in (getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)):
        sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
        whole = [size for size in sizes if isinstance(size, int)]
        if whole:
            return max(whole)
    return None


def resolve_auto(
    content: dict[Any, Any], fill: Fill, keeps: Callable[[str], bool], in_schema: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Replace "auto" in `content` by the values of `fill`; remove the keys for which there is none.

    keeps: tells whether "auto" stays, as a value of its own or in an unknown key. in_schema: tells whether a key is one
    of the schema.

    Returns (unresolved keys of the schema, problems).
    """
    values, unresolved, problems = fill.values(), [], []
    for dotted in [name for name, value in leaves(content) if isinstance(value, str) and value == "auto"]:
        if look(content, dotted) is ABSENT or keeps(dotted):
            continue
        if dotted in values:
            put(content, dotted, values[dotted])
            continue
        drop(content, dotted)
        if dotted in _REQUIRED:
            problems.append(f'{dotted}: is "auto", which only a trainer such as Hugging Face\'s fills in: set a number')
        elif in_schema(dotted):
            unresolved.append(dotted)
    return unresolved, problems


_REQUIRED = ("scheduler.params.total_num_steps",)
"""Keys without a default. Batch sizes have none either, but engines for inference need none."""

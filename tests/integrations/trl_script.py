"""Runs of TRL's SFTTrainer without and with deepspeed=, for test_trl.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.table import InMemoryTable
from hugging_face import gpt2, rows, run_cases
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 64 words, since SFTTrainer needs one."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w0")


def dataset(count: int) -> Dataset:
    """Rows of token ids. The fingerprint is given, since not every pyarrow lets datasets compute one."""
    tokens = [row["input_ids"].tolist() for row in rows(count)]
    return Dataset(InMemoryTable.from_pydict({"input_ids": tokens}), fingerprint=f"rows{count}")


def config(stage: int) -> dict[str, Any]:
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    optimizer = {"type": "AdamW", "params": params}
    return dict.fromkeys(batch, "auto") | {"zero_optimization": zero, "optimizer": optimizer}


def run(folder: Path, deepspeed: Any, **options: Any) -> dict[str, Any]:
    if deepspeed is None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # left by the arguments of the run before
    peft_config, model = options.pop("peft_config", None), options.pop("model", None) or gpt2()
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "deepspeed": deepspeed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_length": 16,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings | options),
        train_dataset=dataset(48),
        eval_dataset=dataset(8),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    assert trainer.is_deepspeed_enabled == (deepspeed is not None)
    trainer.train()
    logged = {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in ("loss", "grad_norm")}
    return logged | {"final": trainer.evaluate()["eval_loss"]}


def plain(folder: Path) -> Any:
    return [run(folder, deepspeed) for deepspeed in (None, config(2), config(3))]


def accumulation(folder: Path) -> Any:
    """With gradient checkpointing, TRL's default."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "gradient_checkpointing": True}
    return [run(folder, deepspeed, **options) for deepspeed in (None, config(2), config(3))]


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=64, target_modules=["c_attn"], fan_in_fan_out=True)


def lora(folder: Path) -> Any:
    return [run(folder, deepspeed, peft_config=adapter()) for deepspeed in (None, config(2), config(3))]


def wide(folder: Path) -> Any:
    return [run(folder, None, per_device_train_batch_size=8, peft_config=peft) for peft in (None, adapter())]


def ranks(folder: Path) -> Any:
    """Full and LoRA runs of stages 2 and 3 on the ranks that this was started with."""
    assert os.environ["WORLD_SIZE"] == "2"
    return [[run(folder, config(stage), peft_config=peft) for stage in (2, 3)] for peft in (None, adapter())]


if __name__ == "__main__":
    run_cases(globals())

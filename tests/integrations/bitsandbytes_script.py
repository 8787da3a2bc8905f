"""Runs of Trainer and SFTTrainer with a base that from_pretrained quantises, for test_bitsandbytes.py."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from hugging_face import run_cases
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from trainer_script import auto, on_nvme, trained, trainer
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed
from trl_script import config as sft_config, run as sft

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
ADAPTER: dict[str, Any] = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def saved_base(folder: Path) -> Path:
    """Return a folder with a small Llama, written once by each rank."""
    path = folder.parent / f"base{os.environ.get('RANK', '0')}"  # each rank writes its own
    if not path.exists():
        set_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        tokens = {"vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
        LlamaForCausalLM(LlamaConfig(**shape, **tokens)).save_pretrained(path)
    return path


def base(folder: Path, kind: str) -> nn.Module:
    quantised = BitsAndBytesConfig(**KINDS[kind])
    model: nn.Module = LlamaForCausalLM.from_pretrained(
        saved_base(folder), quantization_config=quantised, dtype=torch.float32
    )
    return model


def adapted(folder: Path, kind: str) -> nn.Module:
    model = base(folder, kind)
    set_seed(0)
    return get_peft_model(model, LoraConfig(**ADAPTER))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(16)[None]).logits
    return found


def saved_and_merged(run: Any, folder: Path, kind: str) -> dict[str, Any]:
    """Save the adapter, load it over a new base, and merge it. Returns the greatest change of the logits by either."""
    run.save_model(str(folder / "adapter"))
    plain, again = logits(base(folder, kind)), PeftModel.from_pretrained(base(folder, kind), folder / "adapter")
    moved = (logits(again) - plain).abs().max().item()
    merged = (logits(again.merge_and_unload()) - plain).abs().max().item()
    return {"files": sorted(path.name for path in (folder / "adapter").iterdir()), "moved": moved, "merged": merged}


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = load_file(folder / "adapter" / "adapter_model.safetensors")
    return values


def with_trainer(folder: Path, kind: str) -> Any:
    found = []
    for config in (None, auto(2), auto(3), on_nvme(folder)):
        there = folder / str(len(found))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run = trainer(there, config, adapted(folder, kind))
            values = trained(run)
        values |= saved_and_merged(run, there, kind)
        values["kept"] = [str(each.message) for each in said if "still refers" in str(each.message)]
        first, mine = values_of(folder / "0"), values_of(there)
        assert first.keys() == mine.keys()
        values["distance"] = max((mine[name] - first[name]).abs().max().item() for name in first)
        found.append(values)
    return found


def nf4(folder: Path) -> Any:
    return with_trainer(folder, "nf4")


def int8(folder: Path) -> Any:
    return with_trainer(folder, "int8")


def trl(folder: Path) -> Any:
    """SFTTrainer casts adapters on a base in 4 bits to bf16, so the engine has to compute in bf16 too."""
    options = {
        "peft_config": LoraConfig(**ADAPTER),
        "gradient_checkpointing": True,
        "bf16": True,
        "learning_rate": 1e-3,
    }
    return [
        sft(folder, deepspeed, model=base(folder, "nf4"), **options)
        for deepspeed in (None, *(sft_config(stage) | {"bf16": {"enabled": "auto"}} for stage in (2, 3)))
    ]


def wide(folder: Path) -> Any:
    """The batches of two ranks in one plain run."""
    return [trained(trainer(folder, None, adapted(folder, kind), per_device_train_batch_size=8)) for kind in KINDS]


def ranks(folder: Path) -> Any:
    assert os.environ["WORLD_SIZE"] == "2"
    return [
        [trained(trainer(folder, config, adapted(folder, kind))) for config in (auto(2), auto(3))] for kind in KINDS
    ]


if __name__ == "__main__":
    run_cases(globals())

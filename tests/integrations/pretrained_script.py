"""from_pretrained under a stage 3 config, on the ranks that this was started with, for test_pretrained.py."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from hugging_face import run_cases
from trainer_script import auto, on_nvme, trained, trainer
from transformers import TrainingArguments, set_seed

WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32} | WITHOUT_DROPOUT),
    "llama": ("LlamaForCausalLM", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
    "bert": ("BertForMaskedLM", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}),
    "mixtral": ("MixtralForCausalLM", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
}


def model_class(kind: str) -> Any:
    return getattr(transformers, KINDS[kind][0])


def prepare(folder: Path) -> None:
    """Save a small model of each kind, and what loaders have to complete: a base without its head, two equal copies."""
    folder = folder.parent
    for kind, (_, shape) in KINDS.items():
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2} if "hidden_size" in shape else {}
        set_seed(0)
        model = model_class(kind)(model_class(kind).config_class(vocab_size=64, **shape, **heads))
        model.save_pretrained(folder / kind)
        if kind == "llama":
            large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
            model_class(kind)(model_class(kind).config_class(vocab_size=64, **large)).save_pretrained(folder / "large")
        if kind == "bert":
            model.base_model.save_pretrained(folder / "base")
        if kind == "gpt2":
            model.config.save_pretrained(folder / "copies")
            torch.save(model.state_dict(), folder / "copies" / "pytorch_model.bin")


def active(folder: Path, config: Any) -> TrainingArguments:
    """Arguments whose config is active while they live."""
    return TrainingArguments(output_dir=str(folder), deepspeed=config, use_cpu=True, report_to=[])


def values(model: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: value.clone() for name, value in model.state_dict().items()}


def kinds(folder: Path) -> Any:
    """The names of the tensors that differ from those of a plain from_pretrained, by kind."""
    found = {}
    for kind, saved in [(kind, kind) for kind in KINDS] + [("gpt2", "copies")]:
        source, cls = folder.parent / saved, model_class(kind)
        plain = cls.from_pretrained(source)
        arguments = active(folder, auto(3))
        model = cls.from_pretrained(source)
        got, expected = values(model), plain.state_dict()
        del arguments
        assert len(list(model.parameters())) == len(list(plain.parameters())), "tied alike"
        found[saved] = [name for name in expected if not torch.equal(got[name], expected[name])]
    return found


def base(folder: Path) -> Any:
    """Sums of a head that from_pretrained initialises."""
    arguments = active(folder, auto(3))
    set_seed(int(os.environ["RANK"]))
    got = values(model_class("bert").from_pretrained(folder.parent / "base"))
    del arguments
    return {name: [value.sum().item(), value.std().item()] for name, value in got.items() if name.startswith("cls")}


def memory(folder: Path) -> Any:
    """Growth of this rank's peak memory by from_pretrained, and the model's size, in bytes."""
    arguments = active(folder, auto(3))
    values(model_class("llama").from_pretrained(folder.parent / "llama"))  # what the first call imports and keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = model_class("llama").from_pretrained(folder.parent / "large")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    del arguments
    return {"grown": grown * 1024, "size": 4 * sum(p.numel() for p in model.parameters())}


def trained_alike(folder: Path) -> Any:
    """Losses of full and LoRA runs from loaded weights: of a plain Trainer on one process, of stage 3 on two ranks.

    PiSSA computes the adapters from the loaded weights, which it changes.
    """
    from peft import LoraConfig, get_peft_model

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    configs = {"memory": auto(3), "nvme": on_nvme(folder)} if ranks > 1 else {"plain": None}
    found = {}
    for (name, config), adapter in itertools.product(configs.items(), (None, True, "pissa")):
        there = folder / f"{name}{adapter}"
        arguments = active(there, config)
        model = model_class("gpt2").from_pretrained(folder.parent / "gpt2")
        if adapter:
            set_seed(0)
            layers = ["c_attn", "c_proj"]
            settings = LoraConfig(
                r=4, lora_alpha=64, target_modules=layers, fan_in_fan_out=True, init_lora_weights=adapter
            )
            model = get_peft_model(model, settings)
        run = trainer(there, config, model, per_device_train_batch_size=8 // ranks, save_strategy="steps", save_steps=5)
        del arguments
        held = there / "out" / "checkpoint-5"
        found[f"{name} {adapter}"] = trained(run) | {
            "bytes": sum(path.stat().st_size for path in held.rglob("*") if "tokens" not in path.name)
        }
    return found


def resized(folder: Path) -> Any:
    """Losses after more tokens were added to a loaded model."""
    arguments = active(folder, auto(3))
    set_seed(int(os.environ["RANK"]))
    model = model_class("gpt2").from_pretrained(folder.parent / "gpt2")
    model.resize_token_embeddings(80)
    del arguments
    run = trainer(folder, auto(3), model)
    return trained(run)


if __name__ == "__main__":
    run_cases(globals())

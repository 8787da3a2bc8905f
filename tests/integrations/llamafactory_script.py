"""Runs of LLaMA-Factory without and with its ds_z3_offload_config, for test_llamafactory.py. Start it on ranks."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hugging_face import run_cases

import infinity.deepspeed

# LLaMA-Factory imports it for audio only, and PyPI has no build of it for a torch that is built for CPUs.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.train.tuner import run_exp  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

STEPS = 4
CONFIG = Path(__file__).parents[1] / "config" / "public" / "llama_factory_zero3_offload.json"
HOME = Path(sys.argv[1]) / f"home{os.environ['RANK']}"
"""Folder of this rank's model and data sets."""


def save_model() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**shape, **tokens, max_position_embeddings=64)).save_pretrained(HOME / "model")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "w1", "eos_token": "w0", "pad_token": "w0", "unk_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(HOME / "model")


def save_data() -> None:
    def text(*numbers: int) -> str:
        return " ".join(f"w{3 + number % 61}" for number in numbers)

    answers = [{"instruction": text(n, 2 * n), "input": "", "output": text(3 * n, n + 1)} for n in range(32)]
    pairs = [row | {"chosen": text(n), "rejected": text(5 * n, n)} for n, row in enumerate(answers)]
    labelled = [row | {"label": n % 3 > 0} for n, row in enumerate(answers)]
    columns = {"prompt": "instruction", "query": "input"}
    ranked = {"ranking": True, "columns": columns | {"chosen": "chosen", "rejected": "rejected"}}
    tagged = {"columns": columns | {"response": "output", "kto_tag": "label"}}
    entries: dict[str, dict[str, Any]] = {"answers": {}, "pairs": ranked, "labelled": tagged}
    for (name, entry), rows in zip(entries.items(), (answers, pairs, labelled), strict=True):
        (HOME / f"{name}.json").write_text(json.dumps(rows))
        entry["file_name"] = f"{name}.json"
    (HOME / "dataset_info.json").write_text(json.dumps(entries))


def run(stage: str, dataset: str, folder: Path, deepspeed: str | None) -> list[dict[str, float]]:
    """Train for `STEPS` steps, and return the losses and norms that the trainer logs, on rank 0."""
    out = folder / os.environ["RANK"]
    arguments = {
        "model_name_or_path": str(HOME / "model"),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "deepspeed": deepspeed,
        "dataset": dataset,
        "dataset_dir": str(HOME),
        "template": "empty",
        "cutoff_len": 32,
        "output_dir": str(out),
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "disable_gradient_checkpointing": True,
        "flash_attn": "sdpa",
    }
    with mock.patch.object(infinity.deepspeed, "initialize", wraps=infinity.deepspeed.initialize) as initialize:
        run_exp(arguments)
    assert initialize.call_count == (0 if deepspeed is None else 2 if stage in ("dpo", "kto") else 1)
    if os.environ["RANK"] != "0":
        return []
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [{key: entry[key] for key in ("loss", "grad_norm")} for entry in history if "loss" in entry]


CASES = {
    f"{stage}_{kind}": partial(run, stage, dataset, deepspeed=deepspeed)
    for stage, dataset in (("sft", "answers"), ("dpo", "pairs"), ("kto", "labelled"), ("rm", "pairs"))
    for kind, deepspeed in (("plain", None), ("deepspeed", str(CONFIG)))
}
"""One to a process: LLaMA-Factory destroys the process group after a run."""


if __name__ == "__main__":
    HOME.mkdir(parents=True)
    save_model()
    save_data()
    run_cases(CASES)

"""Runs of TRL's trainers with a reference model or generation, without and with deepspeed=: test_trl_reference.py.

DPO and KTO compare with a reference model, GRPO and RLOO generate in each step, and with beta they do both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.table import InMemoryTable
from hugging_face import gpt2, run_cases
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl_script import adapter, config

STEPS = 4


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 64 words, separated by spaces."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "w0")
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)


def text(*numbers: int) -> str:
    return " ".join(f"w{number % 63 + 1}" for number in numbers)


def dataset(**columns: list[Any]) -> Dataset:
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint="-".join(columns))


def prompts(count: int = 32) -> list[str]:
    return [text(n, 2 * n, 3 * n + 1) for n in range(count)]


def pairs() -> Dataset:
    chosen, rejected = ([" " + text(by * n, n + by) for n in range(32)] for by in (1, 5))
    return dataset(prompt=prompts(), chosen=chosen, rejected=rejected)


def labelled() -> Dataset:
    completions = [" " + text(n, n + 7) for n in range(32)]
    return dataset(prompt=prompts(), completion=completions, label=[n % 3 > 0 for n in range(32)])


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of words with an even number."""
    return [sum(int(word[1:]) % 2 == 0 for word in one.split()) / 8 for one in completions]


GENERATED = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
KINDS: dict[str, tuple[Any, Any, Callable[[], Dataset], dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, pairs, {"max_length": 16}),
    "kto": (KTOTrainer, KTOConfig, labelled, {"max_length": 16}),
    "grpo": (GRPOTrainer, GRPOConfig, lambda: dataset(prompt=prompts()), GENERATED),
    "rloo": (RLOOTrainer, RLOOConfig, lambda: dataset(prompt=prompts()), GENERATED),
}


MODEL = Path(sys.argv[1]) / f"model{os.environ.get('RANK', '0')}"
"""Folder of the model. From its path a trainer loads the reference model, too."""


def run(kind: str, folder: Path, deepspeed: Any, lora: bool = False, **options: Any) -> list[dict[str, float]]:
    """Train for `STEPS` steps, and return the numbers that the trainer logs at each, without times."""
    if deepspeed is None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # left by the arguments of the run before
    trainer_class, arguments, data, own = KINDS[kind]
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "deepspeed": deepspeed,
        "use_cpu": True,
        "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **own,
    }
    rewards = {"reward_funcs": even_words} if "num_generations" in own else {}
    trainer = trainer_class(
        model=str(MODEL),
        args=arguments(**settings | options),
        train_dataset=data(),
        processing_class=tokenizer(),
        peft_config=adapter() if lora else None,
        **rewards,
    )
    assert trainer.is_deepspeed_enabled == (deepspeed is not None)
    trainer.train()
    timed = (
        "time",
        "runtime",
        "per_second",
        "learning_rate",
    )  # with the config's optimizer the rate is the next step's
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: value for key, value in entry.items() if not any(t in key for t in timed)} for entry in history]


def compared(kind: str, folder: Path, **options: Any) -> Any:
    """Plain, in stages 2 and 3, and in stage 3 with more units than buffers; on several ranks, plain and the last."""
    place = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    small = config(3)
    small["zero_optimization"] |= place
    small["infinity"] = {"unit_size": 2048, "cache_bytes": 0, "prefetch_bytes": 0}
    configs = (None, small) if "WORLD_SIZE" in os.environ else (None, config(2), config(3), small)
    return [run(kind, folder, deepspeed, **options) for deepspeed in configs]


CASES = {
    "dpo": partial(compared, "dpo"),
    "dpo_lora": partial(compared, "dpo", lora=True),
    "kto": partial(compared, "kto"),
    "kto_lora": partial(compared, "kto", lora=True),
    "grpo": partial(compared, "grpo"),
    "grpo_beta": partial(compared, "grpo", beta=0.1),
    "grpo_lora": partial(compared, "grpo", beta=0.1, lora=True),
    "grpo_ungathered": partial(compared, "grpo", ds3_gather_for_generation=False),
    "rloo": partial(compared, "rloo", beta=0.0),
    "rloo_beta": partial(compared, "rloo", beta=0.1),
    "rloo_lora": partial(compared, "rloo", beta=0.1, lora=True),
}


if __name__ == "__main__":
    gpt2().save_pretrained(MODEL)
    run_cases(CASES)

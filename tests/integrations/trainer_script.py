"""Runs of transformers' Trainer without and with deepspeed=, for test_transformers.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hugging_face import gpt2, rows, run_cases
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from infinity.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "config" / "public"
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def auto(stage: int, optimizer: bool = True, **zero: Any) -> dict[str, Any]:
    """A config whose values Trainer fills in."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config: dict[str, Any] = dict.fromkeys(batch, "auto")
    config["zero_optimization"] = {"stage": stage, **dict.fromkeys(sizes, "auto"), **GATHER, **zero}
    config |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    if optimizer:
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": params}
    return config


def public(name: str) -> dict[str, Any]:
    """A public config in fp32, since these runs have no GPU."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    config["fp16"]["enabled"] = False
    if "train_micro_batch_size_per_gpu" not in config:  # written for a Trainer that added it
        config["train_micro_batch_size_per_gpu"] = "auto"
    return config


def on_nvme(folder: Path) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    return auto(3, offload_param=place, offload_optimizer=place)


def trainer(
    folder: Path, config: Any = None, model: nn.Module | None = None, kind: Any = Trainer, **options: Any
) -> Any:
    """A Trainer of ten steps of AdamW with a falling rate; `config` is its deepspeed=."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 10,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    if config is None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # left by the arguments of the run before
    arguments = options.pop("arguments", TrainingArguments)(deepspeed=config, **settings | options)
    run = kind(model=model or gpt2(), args=arguments, train_dataset=rows(48), eval_dataset=rows(8, seed=2))
    assert run.is_deepspeed_enabled == (config is not None)
    return run


def history(run: Any) -> dict[str, list[float]]:
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return {key: [entry[key] for entry in run.state.log_history if key in entry] for key in keys}


def trained(run: Any, resume: Any = None) -> dict[str, Any]:
    """Train, and return the logged values with those of a small parameter."""
    run.train(resume_from_checkpoint=resume)
    return history(run) | {"final": run.evaluate()["eval_loss"]}


# -- cases: each returns what it measured ------------------------------------------------------------------------------


def plain(folder: Path) -> Any:
    return trained(trainer(folder))


def stages(folder: Path) -> Any:
    configs = {f"{stage} {optimizer}": auto(stage, optimizer) for stage in (0, 1, 2, 3) for optimizer in (True, False)}
    configs["nvme"] = on_nvme(folder)
    return {name: trained(trainer(folder, config)) for name, config in configs.items()}


def clipping(folder: Path) -> Any:
    options = {"max_grad_norm": 0.25, "gradient_accumulation_steps": 2}
    return [trained(trainer(folder, config, **options)) for config in (None, auto(2), auto(3), auto(3, False))]


def no_clipping(folder: Path) -> Any:
    configs = (None, auto(2), auto(3, False), on_nvme(folder))
    return [trained(trainer(folder, config, max_grad_norm=0)) for config in configs]


def public_configs(folder: Path) -> Any:
    """Accelerate's and transformers' files, with the arguments that equal their values."""
    arguments = {"learning_rate": 3e-5, "adam_beta1": 0.8, "weight_decay": 3e-7, "warmup_steps": 500}
    found = {}
    for name in ("transformers_zero2", "transformers_zero3", "accelerate_zero2_offload", "accelerate_zero3_offload"):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(public(name)))
        found[name] = trained(trainer(folder, str(file), **(arguments if "transformers" in name else {})))
    return found


def bf16(folder: Path) -> Any:
    return [trained(trainer(folder, config, bf16=True)) for config in (None, auto(2), auto(3))]


def epochs(folder: Path) -> Any:
    """Epochs whose last step has fewer micro-batches."""
    options = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5}
    return [trained(trainer(folder, config, **options)) for config in (None, auto(2), auto(3))]


def resuming(folder: Path) -> Any:
    """Runs of ten steps, and the same resumed from step 6."""
    found = []
    for number, config in enumerate((None, auto(2), auto(3, False), on_nvme(folder))):
        there = folder / str(number)
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
        options |= {"save_total_limit": 3, "config": config}
        values = trained(trainer(there, **options))
        values["files"] = sorted(path.name for path in (there / "out").iterdir())
        again = trainer(there / "again", **options)
        found.append(values | {"resumed": trained(again, str(there / "out" / "checkpoint-6"))})
    return found


def best_model(folder: Path) -> Any:
    """A rate so large that the first evaluation is the best."""
    found = []
    for config in (None, auto(2), auto(3)):
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        run = trainer(
            folder / str(len(found)),
            config,
            learning_rate=1.0,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            **options,
        )
        found.append(trained(run) | {"best": run.state.best_metric})
    return found


def lora(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    def adapted() -> nn.Module:
        base = gpt2()
        set_seed(0)
        settings = LoraConfig(r=4, lora_alpha=64, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
        return get_peft_model(base, settings)

    found = []
    for config in (None, auto(2), auto(3), on_nvme(folder), auto(3, False)):
        there = folder / str(len(found))
        run = trainer(there, config, adapted(), save_strategy="steps", save_steps=5)
        values = trained(run)
        run.save_model(str(there / "adapter"))
        again = trainer(there / "again", config, adapted(), save_strategy="no")
        values["resumed"] = trained(again, str(there / "out" / "checkpoint-5"))
        saved = load_file(there / "adapter" / "adapter_model.safetensors")
        expected = load_file(folder / "0" / "adapter" / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        values["distance"] = max((saved[key] - expected[key]).abs().max().item() for key in saved)
        values["moved"] = max(value.abs().max().item() for key, value in saved.items() if "lora_B" in key)
        held = there / "out" / "checkpoint-5"
        values["bytes"] = sum(path.stat().st_size for path in held.rglob("*") if "tokens" not in path.name)
        found.append(values)
    return found


def pretrained(folder: Path) -> Any:
    """Weights of `from_pretrained` while a stage 3 config is active, which uses zero.Init, and of `save_model`."""
    source = gpt2()
    source.save_pretrained(folder / "weights")
    found = []
    for config in (None, auto(2), auto(3), on_nvme(folder)):
        there = folder / str(len(found))
        arguments = TrainingArguments(output_dir=str(there), deepspeed=config, use_cpu=True, report_to=[])
        model = GPT2LMHeadModel.from_pretrained(folder / "weights")
        run = trainer(there, config, model)
        values = trained(run)
        run.save_model(str(there / "saved"))
        del arguments
        found.append(values | {"files": sorted(path.name for path in (there / "saved").iterdir())})
    saved = [GPT2LMHeadModel.from_pretrained(folder / str(n) / "saved").state_dict() for n in range(len(found))]
    for values, states in zip(found, saved, strict=True):
        values["distance"] = max((states[name] - saved[0][name]).abs().max().item() for name in saved[0])
    return found


def ungathered(folder: Path) -> Any:
    """`save_model` in stage 3 saves a checkpoint to convert, without stage3_gather_16bit_weights_on_model_save, and
    with it where memory does not hold the weights.
    """
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    found = []
    for gathers in (False, True):
        run = trainer(folder, auto(3, stage3_gather_16bit_weights_on_model_save=gathers), gpt2())
        values = trained(run)
        saved = folder / f"saved_{gathers}"
        with mock.patch("infinity.deepspeed.states.available_memory", lambda: 1000):
            run.save_model(str(saved))
        again = load_state_dict_from_zero_checkpoint(gpt2(), saved)
        found.append([values["final"], trainer(folder, None, again).evaluate()["eval_loss"]])
    return found


def generation(folder: Path) -> Any:
    """Seq2SeqTrainer with predict_with_generate, on a T5."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    found = []
    for config in (None, auto(2), auto(3)):
        set_seed(0)
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
        options = {"predict_with_generate": True, "generation_max_length": 8, "arguments": Seq2SeqTrainingArguments}
        run = trainer(folder, config, model, Seq2SeqTrainer, **options)
        values = trained(run)
        found.append(values | {"written": run.predict(rows(4, seed=3)).predictions.tolist()})
    return found


def evaluation_only(folder: Path) -> Any:
    return [trainer(folder, config).evaluate()["eval_loss"] for config in (None, auto(3))]


def wide(folder: Path) -> Any:
    return trained(trainer(folder, per_device_train_batch_size=8))


def ranks(folder: Path) -> Any:
    """Stages on the ranks that this was started with; the losses of every rank are equal."""
    return {str(stage): trained(trainer(folder, auto(stage))) for stage in (2, 3)} | {"world": os.environ["WORLD_SIZE"]}


def documented(folder: Path) -> Any:
    """The config of docs/huggingface.md, without the setting that selects the CPU."""
    config = json.loads(_first_block(Path(__file__).parents[2] / "docs" / "huggingface.md", "json"))
    for name in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][name]["nvme_path"] = str(folder)
    run = trainer(folder, config, use_cpu=False)
    return trained(run) | {"of": [run.args.process_index, run.args.world_size]}


def initialized(folder: Path) -> Any:
    """Runs of a script that has a process group before its arguments."""
    torch.distributed.init_process_group("gloo")
    return [trained(trainer(folder, auto(stage), use_cpu=use_cpu)) for stage, use_cpu in ((2, False), (3, True))]


def _first_block(page: Path, language: str) -> str:
    return page.read_text().split(f"```{language}\n")[1].split("```")[0]


def optimizers(folder: Path) -> Any:
    """optim → (losses of a plain run, those with the state on the host and by force or not; or an error's text)."""
    found: dict[str, Any] = {}
    for optim in ("sgd", "rmsprop", "adafactor", "adagrad"):
        outcomes: list[Any] = [trained(trainer(folder, optim=optim))["loss"]]
        for forced in (True, False):
            config = auto(2, optimizer=False, offload_optimizer={"device": "cpu"})
            config |= {} if forced else {"zero_force_ds_cpu_optimizer": False}
            try:
                outcomes.append(trained(trainer(folder, config, optim=optim))["loss"])
            except ConfigError as error:
                outcomes.append(str(error))
        found[optim] = outcomes
    return found


if __name__ == "__main__":
    run_cases(globals())

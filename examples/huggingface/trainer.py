"""Trains a GPT-2 with transformers' Trainer and deepspeed=, with every state on NVMe.

    infinity run examples/huggingface/trainer.py --nvme-path /local_nvme
    infinity run examples/huggingface/trainer.py --nvme-path /local_nvme --lora

Nothing here is Infinity's: `infinity run` puts it in place of deepspeed. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

TEXT = b"Parameters move between the device, host memory and NVMe while the model computes. "


def config(nvme_path: str) -> dict[str, object]:
    place = {"device": "nvme", "nvme_path": nvme_path}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero | {"stage3_gather_16bit_weights_on_model_save": True},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--output", default=tempfile.mkdtemp(), help="folder for the trained weights")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lora", action="store_true", help="train adapters (needs peft)")
    parser.add_argument("--local_rank", type=int, help="passed by the launcher")
    args = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=args.output,
        deepspeed=config(args.nvme_path),
        per_device_train_batch_size=8,
        max_steps=args.steps,
        learning_rate=2e-2 if args.lora else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        layers = ["c_attn", "c_proj", "c_fc"]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=layers, fan_in_fan_out=True))
    text = torch.tensor(list(8 * TEXT))
    rows = [{"input_ids": text[start : start + 64], "labels": text[start : start + 64]} for start in range(256)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

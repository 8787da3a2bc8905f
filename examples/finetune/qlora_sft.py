"""Trains LoRA adapters over a base in 4 bits whose weights are on NVMe (QLoRA), by TRL's SFTTrainer.

    infinity run examples/finetune/qlora_sft.py --model FOLDER --data texts.jsonl --nvme-path /local_nvme

`--data` has one JSON object a line: a "text", "prompt" and "completion", or "messages". Nothing here is Infinity's:
`infinity run` puts it in place of deepspeed.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


def on_drive(nvme_path: str) -> dict[str, object]:
    """A DeepSpeed config with every state on NVMe; Trainer fills in "auto"."""
    drive = {"device": "nvme", "nvme_path": nvme_path}
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of a model in Hugging Face's format")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--nvme-path", required=True, help="folder on a local drive")
    parser.add_argument("--output", default="adapter")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--local_rank", type=int, help="passed by the launcher")
    args = parser.parse_args()

    arguments = SFTConfig(
        output_dir=args.output,
        deepspeed=on_drive(args.nvme_path),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        max_steps=args.steps,
        max_length=512,
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    # After the arguments: from_pretrained then puts the codes on the drive, layer by layer.
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=four_bits, dtype=torch.bfloat16)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

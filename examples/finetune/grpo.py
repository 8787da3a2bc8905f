"""Trains by reinforcement learning with TRL's GRPOTrainer: the policy, on NVMe, generates in each step.

    infinity run examples/finetune/grpo.py --model FOLDER --data prompts.jsonl --nvme-path /local_nvme

`--data` has one JSON object a line, with a "prompt". rewards.py, in the same folder, has the reward. Nothing here is
Infinity's: `infinity run` puts it in place of deepspeed.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from rewards import lowercase
from trl import GRPOConfig, GRPOTrainer


def on_drive(nvme_path: str) -> dict[str, object]:
    """A DeepSpeed config with every state on NVMe; Trainer fills in "auto"."""
    drive = {"device": "nvme", "nvme_path": nvme_path}
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {
            "stage": 3,
            "offload_param": drive,
            "offload_optimizer": drive,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of a model in Hugging Face's format")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--nvme-path", required=True, help="folder on a local drive")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--local_rank", type=int, help="passed by the launcher")
    args = parser.parse_args()

    arguments = GRPOConfig(
        output_dir=args.output,
        deepspeed=on_drive(args.nvme_path),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        ds3_gather_for_generation=False,  # units are fetched as they are used; the model is never whole in memory
        num_generations=4,
        max_completion_length=args.tokens,
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=lowercase,
        args=arguments,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

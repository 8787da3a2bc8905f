"""Trains LoRA adapters over a base in 4 bits whose weights are on NVMe (QLoRA), in a loop of its own.

    python examples/finetune/qlora.py --model FOLDER --data texts.jsonl --nvme-path /local_nvme

`--data` has one JSON object a line, with a "text". The adapter is saved in --output, in PEFT's format.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import infinity


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of a model in Hugging Face's format")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a text")
    parser.add_argument("--nvme-path", required=True, help="folder on a local drive")
    parser.add_argument("--output", default="adapter")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    drive = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_batch_size": args.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
    }
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with infinity.Init(config):  # codes go to the drive layer by layer
        base = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=four_bits, dtype=torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.train()  # from_pretrained returns a model in eval mode, which checkpoints nothing
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # checkpointed blocks need an input with a gradient

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [json.loads(line)["text"] for line in args.data.read_text().splitlines()]
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(1, args.steps + 1):
            chosen = [texts[at] for at in torch.randint(len(texts), (args.batch,))]
            batch = tokenizer(chosen, return_tensors="pt", padding=True, truncation=True, max_length=args.length)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = engine(**batch, labels=labels).loss
            engine.backward(loss)
            engine.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        # Without state_dict=, PEFT reads the whole base into memory.
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        trained = infinity.stream_weights(engine, names=names, merge_adapters=False)
        model.save_pretrained(args.output, state_dict=dict(trained))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"adapter in {args.output}; peak of resident memory {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

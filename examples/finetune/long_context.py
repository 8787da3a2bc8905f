"""Trains on long sequences: checkpointed blocks, whose inputs wait on NVMe, and a loss in chunks.

    python examples/finetune/long_context.py --model FOLDER --data texts.jsonl --nvme-path /local_nvme --length 32768

`--data` has one JSON object a line, with a "text"; texts are joined into sequences of --length tokens. All weights are
trained, and saved in --output in Hugging Face's format.
"""

from __future__ import annotations

import argparse
import json
import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity
from infinity.nn.loss import token_cross_entropy


def chunked_loss(model: Any, rows: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a causal model, whose logits exist for `rows` tokens at a time, in backward too."""

    def summed(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_cross_entropy(model.lm_head(hidden), targets) * len(targets)

    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([checkpoint(summed, *part, use_reentrant=False) for part in parts]).sum() / len(targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of a causal model in Hugging Face's format")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a text")
    parser.add_argument("--nvme-path", required=True, help="folder on a local drive")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--rows", type=int, default=1024, help="tokens whose logits exist at a time")
    parser.add_argument("--activations", choices=("nvme", "cpu", "none"), default="nvme", help="where they wait")
    parser.add_argument("--no-checkpoints", action="store_true", help="save all activations, and recompute none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()

    drive = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {"activations": {"device": args.activations}},
    }
    torch.manual_seed(0)
    with infinity.Init(config):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.train()  # from_pretrained returns a model in eval mode, which checkpoints nothing
    if not args.no_checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.forward = partial(chunked_loss, model, args.rows)  # parameters keep their names
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [json.loads(line)["text"] for line in args.data.read_text().splitlines()]
    tokens = tokenizer((tokenizer.eos_token or "\n").join(texts), return_tensors="pt")["input_ids"][0]
    sequences = tokens[: len(tokens) // args.length * args.length].view(-1, 1, args.length)

    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(1, args.steps + 1):
            loss = engine(sequences[step % len(sequences)])
            engine.backward(loss)
            engine.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        engine.save_16bit_model(args.output, "model.safetensors")
    model.config.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"weights in {args.output}; peak of resident memory {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

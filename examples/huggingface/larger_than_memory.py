"""Trains all weights of a model whose states exceed a limit of memory: transformers' Trainer, every state on NVMe.

    infinity run examples/huggingface/larger_than_memory.py --nvme-path /local_nvme \\
        --limit-gib 3 --layers 18 --width 1536 --lr 1e-4

The script measures the peak of its resident memory, mapped files included, and fails if it is above --limit-gib. The
defaults are small. Nothing here is Infinity's: `infinity run` puts it in place of deepspeed. Nothing is downloaded: the
script writes the weights that it loads.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

TEXT = b"Parameters move between the device, host memory and NVMe while the model computes. "
STATES = 16
"""Bytes per parameter in memory: an fp32 parameter, its gradient and two moments."""
GIB = 1 << 30


def config(nvme_path: str) -> dict[str, object]:
    place = {"device": "nvme", "nvme_path": nvme_path}
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        **dict.fromkeys(batch, "auto"),
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", type=Path, default=Path(tempfile.gettempdir()), help="folder for all files")
    parser.add_argument("--limit-gib", type=float, default=3.0, help="limit of the peak of resident memory")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--local_rank", type=int, help="passed by the launcher")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(dir=args.nvme_path))
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        deepspeed=config(str(args.nvme_path)),
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    try:
        train(args, arguments, folder / "weights")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train(args: argparse.Namespace, arguments: TrainingArguments, weights: Path) -> None:
    set_seed(0)
    shape = {"hidden_size": args.width, "intermediate_size": 8 * args.width // 3, "num_hidden_layers": args.layers}
    shape |= {"num_attention_heads": args.width // 64, "vocab_size": 256}
    # Both run under zero.Init, since `arguments` are of stage 3: the values are in a file in --nvme-path.
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    model.save_pretrained(weights, max_shard_size="200MB")
    del model
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)

    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {STATES * count / GIB:.2f} GiB of states", flush=True)
    text = torch.tensor(list(8 * TEXT))
    rows = [{"input_ids": row, "labels": row} for row in (text[s : s + args.length] for s in range(256))]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"peak of resident memory: {peak:.2f} GiB, limit {args.limit_gib:g} GiB")
    if peak > args.limit_gib:
        raise SystemExit("the peak is above the limit: lower infinity.prefetch_bytes, or the width of the model")


if __name__ == "__main__":
    main()

"""Trains LoRA adapters over a frozen base that stays on NVMe, and saves a checkpoint without the base.

    infinity run examples/huggingface/lora.py --nvme-path /local_nvme
    infinity run --num_gpus 2 examples/huggingface/lora.py --nvme-path /local_nvme

Nothing here is Infinity's: `infinity run` puts it in place of deepspeed. Nothing is downloaded: the script writes the
base that it loads. transformers loads it under zero.Init while an HfDeepSpeedConfig is alive.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed
from transformers.integrations import HfDeepSpeedConfig

TEXT = b"Parameters move between the device, host memory and NVMe while the model computes. "
BATCH, LENGTH = 8, 64


def config(nvme_path: str) -> dict[str, object]:
    place = {"device": "nvme", "nvme_path": nvme_path}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }


def write_base(folder: Path, layers: int, width: int) -> None:
    """Save a Llama with new weights, in place of a pretrained one."""
    set_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **shape)).save_pretrained(folder)


def load(base: Path, settings: dict[str, object]) -> torch.nn.Module:
    """Load the base under zero.Init and add adapters, the same on every run."""
    active = HfDeepSpeedConfig(settings)  # from_pretrained looks for it
    model = AutoModelForCausalLM.from_pretrained(base)
    del active
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj"]))


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--output", type=Path, help="folder for the base and the checkpoint, the same on every rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--local_rank", type=int, help="passed by the launcher")
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    output = args.output or Path(tempfile.gettempdir()) / f"lora-{os.getppid()}"
    base, checkpoints = output / "base", output / "checkpoints"
    if rank == 0:
        write_base(base, args.layers, args.width)
    deepspeed.comm.barrier()

    settings = config(args.nvme_path)
    engine, *_ = deepspeed.initialize(model=load(base, settings), config=settings)
    text = torch.tensor(list(8 * TEXT))
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts]).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    engine.save_checkpoint(str(checkpoints), exclude_frozen_parameters=True)
    loss = engine(input_ids=tokens, labels=tokens).loss.item()
    engine.destroy()

    # Another run loads the base again, and the adapters from the checkpoint.
    engine, *_ = deepspeed.initialize(model=load(base, settings), config=settings)
    engine.load_checkpoint(str(checkpoints), load_module_strict=False)
    again = engine(input_ids=tokens, labels=tokens).loss.item()
    if rank == 0:
        print(f"base {nbytes(base):,} bytes, checkpoint {nbytes(checkpoints):,} bytes")
        print(f"loss {loss:.6f}, from the checkpoint {again:.6f}")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a Llama of Hugging Face transformers with every state on NVMe, then generates with the same engine.

    python examples/hugging_face.py --nvme-path /local_nvme

The model is built from a config on the meta device, so nothing is downloaded and the model is never whole in memory.
For pretrained weights in a local folder, call infinity.load_pretrained(model, folder) before infinity.initialize.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

TEXT = b"Parameters move between the device, host memory and NVMe while the model computes. "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape))
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    text = torch.tensor(list(4 * TEXT))
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(1, args.steps + 1):
            starts = torch.randint(len(text) - 64, (8,))
            tokens = torch.stack([text[start : start + 64] for start in starts])
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        written = engine.generate(text[None, :16], max_new_tokens=32, do_sample=False)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()

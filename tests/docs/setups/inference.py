"""`config`, `inputs`, weights and `engine.json` of docs/inference.md."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=32, max_position_embeddings=128, **shape)
AutoModelForCausalLM.from_config(config).save_pretrained("folder")
Path("engine.json").write_text(
    json.dumps({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "."}}})
)
inputs = torch.randint(32, (1, 4))
assert infinity.init_inference

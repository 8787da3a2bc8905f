"""`engine`, `config` and weights of docs/checkpoint.md."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=32, **shape)
pretrained = AutoModelForCausalLM.from_config(config)
pretrained.save_pretrained("folder")
Path("engine.json").write_text(json.dumps({"train_batch_size": 1}))
engine, *_ = infinity.initialize(model=torch.nn.Linear(4, 4), config="engine.json")

"""Checkpoints: logical names and safetensors, streamed unit by unit. The format is specified in docs/checkpoint.md."""

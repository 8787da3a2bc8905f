"""One training step in the plain PyTorch loop, Infinity, DeepSpeed, FSDP2 and torchao, on one CPU: see `run.py`."""

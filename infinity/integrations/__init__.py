"""Integrations: a strategy for Lightning's Trainer, and functions of DeepSpeed's `zero_to_fp32`."""

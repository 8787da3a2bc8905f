"""Integrations: import of DeepSpeed's checkpoints, and a strategy for Lightning's Trainer."""

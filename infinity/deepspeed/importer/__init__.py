"""Reads checkpoints of DeepSpeed, and converts them to ones of Infinity."""

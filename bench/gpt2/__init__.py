"""The demo: GPT-2 on the bytes of a text."""

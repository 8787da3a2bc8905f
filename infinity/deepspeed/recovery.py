"""Writes the script `zero_to_fp32.py` beside checkpoints, where DeepSpeed's users look for it."""

from __future__ import annotations

from pathlib import Path

_NAME = "zero_to_fp32.py"
_TEXT = """#!/usr/bin/env python
# Writes the fp32 weights of a checkpoint in this folder: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR
from infinity.deepspeed.utils.zero_to_fp32 import main

main()
"""


def write_script(folder: Path) -> None:
    """Write the script to `folder`, the one with the checkpoints' folders, and make it executable."""
    path = folder / _NAME
    path.write_text(_TEXT, encoding="utf-8")
    path.chmod(path.stat().st_mode | 0o111)

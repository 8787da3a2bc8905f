"""Files of checkpoints in which DeepSpeed's users and Lightning look for weights, stage and client_state."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import CLIENT_STATE, INDEX, file_in, read_index

_STAGE = 3


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return DeepSpeed's files of the optimizer. For a checkpoint of an engine: one that holds only `zero_stage`.

    checkpoint_dir: the folder of a tag. Raises CheckpointError if it holds no checkpoint.
    """
    return _theirs(Path(checkpoint_dir), "*_optim_states.pt") or [_stage_file()]


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Return DeepSpeed's files of the model. For a checkpoint of an engine: the one that holds its client_state."""
    folder = Path(checkpoint_dir)
    return _theirs(folder, "*_model_states.pt") or [str(file_in(folder, CLIENT_STATE))]


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the file of `get_model_state_files` that rank 0 saved."""
    found = get_model_state_files(checkpoint_dir)
    name = f"{'zero_pp_rank_0_' if zero_stage >= _STAGE else ''}mp_rank_00_model_states.pt"
    return next((path for path in found if Path(path).name == name), found[0])


def _theirs(folder: Path, pattern: str) -> list[str]:
    """Return the files of a DeepSpeed checkpoint, in the order of ranks; none for one of an engine."""
    if (folder / INDEX).exists():
        return []
    found = sorted(folder.glob(pattern), key=lambda path: [int(each) for each in re.findall(r"\d+", path.name)])
    if not found:
        read_index(folder)  # raises the error
    return list(map(str, found))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="infinity-")


def _stage_file() -> str:
    """Return a file with the stage, in a temporary folder: checkpoints of engines load in every stage."""
    path = Path(_folder().name) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content: dict[str, Any] = {"optimizer_state_dict": {"zero_stage": _STAGE}}
    torch.save(content, path)
    return str(path)


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

"""Reads the fp32 weights of a checkpoint without an engine, under the names of DeepSpeed's `zero_to_fp32`.

Reads checkpoints of engines and of DeepSpeed, and finds the files in which Lightning looks for weights, stage and
client_state. `python -m infinity.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR` has the arguments of
DeepSpeed's script.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from infinity.checkpoint.export import export
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, INDEX, LATEST, file_in, find, read_index, read_tag
from infinity.checkpoint.saved import CheckpointFolder, check_contents, check_files
from infinity.deepspeed.importer import zero_to_fp32 as theirs
from infinity.errors import UsageError
from infinity.inputs import replacing
from infinity.nn.pieces import Piece
from infinity.sizes import parse_size

WEIGHTS = "pytorch_model.bin"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the masters and buffers of a checkpoint, compared with its checksums: fp32, unsharded, in host memory.

    tag: by default the last. Names of a shared parameter or buffer share one tensor. Raises UsageError for lazy_mode;
    `convert_zero_checkpoint_to_fp32_state_dict` converts checkpoints larger than memory.
    """
    if lazy_mode:
        raise UsageError(
            "lazy_mode=True is not supported: use convert_zero_checkpoint_to_fp32_state_dict(safe_serialization=True), "
            "which needs memory for a part of one parameter"
        )
    if _is_deepspeeds(checkpoint_dir, tag):
        return theirs.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = find(Path(checkpoint_dir), tag)
    saved = CheckpointFolder(folder)
    index = saved.index
    check_files(index, folder)
    check_contents(index, folder, fix="Use another checkpoint.")
    states: dict[str, torch.Tensor] = {}
    for name, entry in index.parameters.items():
        kind = index.kinds(name)[0]  # the master, or a frozen parameter itself
        if exclude_frozen_parameters and not entry.trainable:
            continue
        value = saved.read(Piece(name, entry.shape), [kind])[kind.name]
        states[name] = value.float() if value.is_floating_point() else value
    with safe_open(folder / BUFFERS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is not iterable
            states[name] = tensors.get_tensor(name)
    return states | {alias: states[name] for alias, name in index.aliases.items() if name in states}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU, load a checkpoint's masters into it, and return it.

    As in DeepSpeed, an engine of the model ends with this call, so that the model is a plain one again, also after
    `engine.destroy()`. Parameters keep their dtypes. Raises CheckpointError, before any change, if the checkpoint is
    missing, damaged or of another model. Names that only DeepSpeed's own checkpoint or the model has are ignored.
    """
    from infinity.deepspeed.plain_model import load_plain  # here, since the command needs no engine

    states = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    return load_plain(model, states, Path(checkpoint_dir), strict=not _is_deepspeeds(checkpoint_dir, tag))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint to `output_dir`: safetensors, or one pytorch_model.bin.

    max_shard_size: size of a safetensors file; a larger pytorch_model.bin raises UsageError.
    """
    if _is_deepspeeds(checkpoint_dir, tag):
        theirs.convert_zero_checkpoint_to_fp32_state_dict(
            checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
        )
        return
    if safe_serialization:
        if exclude_frozen_parameters:
            raise UsageError("safe_serialization=True writes all parameters: leave exclude_frozen_parameters out")
        export(checkpoint_dir, output_dir, tag=tag, dtype="fp32", max_shard_size=max_shard_size, every_name=True)
        return
    states = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    nbytes = sum(value.nbytes for value in states.values())
    if nbytes > parse_size(max_shard_size):
        raise UsageError(
            f"the weights have {nbytes:,} bytes, more than max_shard_size ({max_shard_size}): pass "
            "safe_serialization=True, which writes several files in little memory"
        )
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as file:
        torch.save(states, file)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, dtype: Any = torch.float32, **options: Any
) -> None:
    """Call `convert_zero_checkpoint_to_fp32_state_dict`. Raises UsageError for other dtypes, which `export` writes."""
    if dtype not in (torch.float32, "float32", "fp32"):
        raise UsageError(f"dtype is {dtype}: use `infinity export --dtype`, which converts in little memory")
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, **options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `convert_zero_checkpoint_to_fp32_state_dict` with the arguments of DeepSpeed's script."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder passed to save_checkpoint")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a file (default: %(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, in little memory")
    parser.add_argument("-t", "--tag", help="checkpoint to read; by default the one in the file `latest`")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)


def _is_deepspeeds(directory: str | Path, tag: str | None) -> bool:
    """Return True if the checkpoint has DeepSpeed's files."""
    folder = Path(directory)
    if tag is None:
        with suppress(OSError):  # the readers raise it
            tag = read_tag(folder / LATEST)
    return any((folder / tag if tag else folder).glob("*_states.pt"))


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
    torch.save({"optimizer_state_dict": {"zero_stage": _STAGE}}, path)
    return str(path)


if __name__ == "__main__":
    main()

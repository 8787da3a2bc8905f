"""Reads the fp32 weights of a checkpoint without an engine, under the names of DeepSpeed's `zero_to_fp32`.

Reads checkpoints of engines and of DeepSpeed. `python -m infinity.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR
OUTPUT_DIR` has the arguments of DeepSpeed's script.

Loads a checkpoint's weights into a model on the CPU, after closing its engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import nn

import infinity.engine.gather as gather
from infinity.checkpoint.export import export
from infinity.checkpoint.format import BUFFERS, LATEST, find, names_of_buffers, read_tag
from infinity.checkpoint.saved import CheckpointFolder, check_contents, check_files
from infinity.deepspeed.checkpoint_files import get_model_state_file, get_model_state_files, get_optim_files
from infinity.deepspeed.importer import zero_to_fp32 as theirs
from infinity.errors import CheckpointError, UsageError
from infinity.inputs import replacing
from infinity.nn.pieces import Piece, Pieces
from infinity.sizes import parse_size
from infinity.units import released
from infinity.units.compiled import own_name, uncompiled

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
    from infinity.deepspeed.zero_to_fp32 import load_plain  # here, since the command needs no engine

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


__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


Model = TypeVar("Model", bound=nn.Module)
States = Mapping[str, torch.Tensor]
_SHOWN = 3
"""Largest number of problems in an error."""


class _Expected(NamedTuple):
    """Shape of a tensor of the model's state dict, and the identity of the parameter or buffer."""

    shape: tuple[int, ...]
    owner: int


def load_plain(model: Model, states: States, source: Path, *, strict: bool) -> Model:
    """Close the engines of `model`, move it to the CPU, load `states` into it, and return it.

    states: values by their names in the model's state dict; one name of a shared tensor suffices. source: their folder,
    for messages. strict: raise CheckpointError, before any change, if names differ; other shapes raise it in any case.
    """
    expected = _expected(model)
    states = _under_every_name(expected, states)
    _check(expected, states, source, strict=strict)
    _leave_engines(model)
    model = model.cpu()
    uncompiled(model).load_state_dict(states, strict=strict)
    return model


def _expected(model: nn.Module) -> dict[str, _Expected]:
    pieces, found = Pieces(model), dict[str, _Expected]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        piece = pieces.of(own_name(name), parameter)
        found[piece.name] = _Expected(tuple(piece.shape), id(parameter))
    for name, buffer in names_of_buffers(model).items():
        found[name] = _Expected(tuple(buffer.shape), id(buffer))
    return found


def _under_every_name(expected: Mapping[str, _Expected], states: States) -> dict[str, torch.Tensor]:
    """Return `states` with the further names of shared tensors, which checkpoints of older versions lack."""
    values = {each.owner: states[name] for name, each in expected.items() if name in states}
    missing = {name: values[each.owner] for name, each in expected.items() if each.owner in values}
    return {**missing, **states}


def _check(expected: Mapping[str, _Expected], states: States, source: Path, *, strict: bool) -> None:
    problems = []
    if strict:
        problems = [f"{name} is in the model only" for name in expected if name not in states]
        problems += [f"{name} is in the checkpoint only" for name in states if name not in expected]
    for name, (shape, _) in expected.items():
        if name in states and tuple(states[name].shape) != shape:
            shapes = f"{list(shape)} in the model and {list(states[name].shape)} in the checkpoint"
            problems.append(f"{name} has shape {shapes}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{source} is a checkpoint of another model: {'; '.join(problems[:_SHOWN])}{more}")


def _leave_engines(model: nn.Module) -> None:
    """Close the engines of the parameters of `model`, and give parameters without values memory on the CPU."""
    found = [gather._find(parameter) for parameter in model.parameters()]
    for engine in dict.fromkeys(each[0] for each in found if each is not None):
        engine.close()
    for parameter in model.parameters():
        if released.is_released(parameter):
            released.restore([parameter])
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)


if __name__ == "__main__":
    main()

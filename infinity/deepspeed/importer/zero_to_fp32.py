"""DeepSpeed's functions of `zero_to_fp32`, for DeepSpeed's checkpoints and without DeepSpeed.

They also read stage 0 and universal checkpoints, and include the frozen parameters of stage 1. They run no code of the
checkpoint.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from infinity.checkpoint.tensors import WEIGHTS, WEIGHTS_INDEX, Spec, write_tensors
from infinity.checkpoint.writer import appearing, check_out
from infinity.deepspeed.importer.convert import packed, read_deepspeed
from infinity.deepspeed.importer.states import StoredState
from infinity.errors import UsageError
from infinity.sizes import parse_size

Model = TypeVar("Model", bound=nn.Module)

_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, torch.Tensor]:
    """Return the state dict of a DeepSpeed checkpoint on the CPU, with fp32 masters for trained parameters.

    Floating-point buffers are fp32, frozen parameters keep their dtype, and names of a shared parameter share one
    tensor. tag: by default the one in `latest`. Needs host memory for the whole model. Raises CheckpointError if the
    checkpoint is missing, damaged, or of a kind that Infinity cannot read.
    """
    found, aliases = _states(checkpoint_dir, tag, exclude_frozen_parameters)
    whole = OrderedDict((name, state.read(dtype)) for name, (state, dtype) in found.items())
    whole.update((alias, whole[name]) for alias, name in aliases.items())
    return whole


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the result of `get_fp32_state_dict_from_zero_checkpoint` to the new folder `output_dir`.

    safe_serialization: True writes model.safetensors, in parts, so that memory holds a part of one parameter; False
    writes pytorch_model.bin with `torch.save`, which needs memory for one file. max_shard_size: largest size of a file;
    several files get an index. None writes one file. The folder appears complete or not at all.
    """
    found, aliases = _states(checkpoint_dir, tag, exclude_frozen_parameters)
    found |= {alias: found[name] for alias, name in aliases.items()}
    specs = {name: Spec(dtype, state.shape) for name, (state, dtype) in found.items()}
    total = sum(spec.nbytes for spec in specs.values())
    limit = total if max_shard_size is None else parse_size(max_shard_size)
    if limit <= 0 < total:
        raise UsageError(f"max_shard_size is {max_shard_size!r}: pass a positive size, such as 5GB")
    shards = packed({name: {name: spec} for name, spec in specs.items()}, limit)
    weights, index = (WEIGHTS, WEIGHTS_INDEX) if safe_serialization else (_PICKLED, _PICKLED_INDEX)
    stem, _, suffix = weights.rpartition(".")

    def parts(name: str) -> Iterator[torch.Tensor]:
        state, dtype = found[name]
        return state.parts(dtype)

    check_out(Path(output_dir), total)
    with appearing(Path(output_dir)) as folder:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = weights if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
            weight_map |= dict.fromkeys(shard, file)
            if safe_serialization:
                write_tensors(folder / file, {name: specs[name] for name in shard}, parts, {"format": "pt"})
            else:
                torch.save({name: found[name][0].read(found[name][1]) for name in shard}, folder / file)
        if len(shards) > 1:
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / index).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: str | Path, tag: str | None = None) -> Model:
    """Move `model` to the CPU, load a DeepSpeed checkpoint's parameters and buffers into it, and return it.

    As in DeepSpeed, names that only one of the two has are ignored. The model must have no engine.
    """
    whole = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu()
    model.load_state_dict(whole, strict=False)
    return model


_Found = dict[str, tuple[StoredState, torch.dtype]]
"""Name → the values, and the dtype in which they are returned."""


def _states(checkpoint_dir: str | Path, tag: str | None, exclude_frozen: bool) -> tuple[_Found, dict[str, str]]:
    """Return buffers, frozen and trained parameters, in DeepSpeed's order, and the names of shared parameters."""
    stored = read_deepspeed(checkpoint_dir, tag)
    found: _Found = {}
    for name, tensor in stored.buffers.items():
        found[name] = StoredState.whole(tensor), torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    for name, parameter in stored.parameters.items():
        if parameter.trained:
            found[name] = parameter.states["master"], torch.float32
        elif not exclude_frozen:
            found[name] = parameter.states["param"], parameter.dtype
    return found, {alias: name for alias, name in stored.aliases.items() if name in found}

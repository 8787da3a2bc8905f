"""Exports a checkpoint, part by part, as safetensors files that Hugging Face's `from_pretrained` reads.

`from_pretrained(folder)` casts the weights to the dtype in config.json, so the dtype of the exported weights is written
there. transformers 5 calls the key `dtype`, transformers 4 `torch_dtype`. Composite models nest one config per part,
each with a dtype of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.checkpoint.committed import open_shards
from infinity.checkpoint.format import BUFFERS, INDEX, LATEST, Index, find, key, read_index
from infinity.checkpoint.saved import check_contents, check_files
from infinity.checkpoint.tensors import WEIGHTS, WEIGHTS_INDEX, Spec, parts_of, spec_of, write_tensors
from infinity.checkpoint.writer import appearing, check_out
from infinity.errors import CheckpointError, UsageError
from infinity.inputs import parse_json, read_input
from infinity.optim.cpu_adam import split_master
from infinity.sizes import parse_size

CONFIG = "config.json"
_KEYS = ("dtype", "torch_dtype")


def with_dtype(file: Path, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """Return the content of `file`, a config.json, with the dtype of these weights in it, encoded as UTF-8.

    dtypes: name of each floating-point parameter → its dtype. Raises UsageError if `file` holds no JSON object, or if
    the weights have several dtypes: a config names only one.
    """
    try:
        config = parse_json(read_input(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}): pass a folder with the model's config.json") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object: pass a folder with the model's config.json")
    first_names: dict[torch.dtype, str] = {}
    for name, dtype in dtypes.items():
        first_names.setdefault(dtype, name)
    if len(first_names) > 1:
        examples = ", ".join(f"{name} is {_named(dtype)}" for dtype, name in first_names.items())
        raise UsageError(
            f"the parameters compute in several dtypes ({examples}), but {CONFIG} holds one, to which from_pretrained "
            "casts all of them. Choose it with --dtype (dtype=), or pass --config-from (config_from=) a folder without "
            f"{CONFIG}."
        )
    for dtype in first_names:
        _set(config, _named(dtype))
        if not any(key in config for key in _KEYS):
            config[_KEYS[0]] = _named(dtype)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _set(config: dict[str, Any], dtype: str) -> None:
    for name, value in config.items():
        if name in _KEYS:
            if value is None or isinstance(value, (str, dict)):
                config[name] = dtype
        # The config of a part of the model. Other objects (a vocabulary) may hold such keys too.
        elif isinstance(value, dict) and (
            "model_type" in value or (name.endswith("_config") and name != "quantization_config")
        ):
            _set(value, dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_METADATA = {"format": "pt"}
"""transformers refuses files without this entry."""
_OF_THE_RUN = (LATEST, "trainer_state.json", "zero_to_fp32.py")
"""Files that a Trainer writes beside a checkpoint, and that belong to no model."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")

Step = Callable[[float, str], None]
"""Progress callback: the fraction done, from 0 to 1, and the current activity."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the checkpoint, and the dtype and shape it is written with."""

    parts: Callable[[], Iterator[torch.Tensor]]
    """Yields its elements in order, at most `PART` at once, in the dtype of the checkpoint."""
    spec: Spec


_Shard = dict[str, _Tensor]


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config_from: str | Path | None = None,
    verify: bool = True,
    every_name: bool = False,
    step: Step = lambda done, what: None,
) -> Path:
    """Write the parameters and persistent buffers of a checkpoint to the new folder `out`, and return `out`.

    checkpoint: the directory passed to `save_checkpoint`, read at `tag` or at the last tag; or the checkpoint's own
    folder. dtype: "bf16", "fp16" or "fp32" for all parameters; by default the dtype each computes in. Masters are
    rounded to bf16 as in training (half away from zero), and cast to other dtypes. Buffers and integers are unchanged.
    config_from: a Hugging Face folder whose other files (config.json, the tokenizer's) are copied; the dtype in the
    copied config.json is set to that of the weights. verify: first read the whole checkpoint and compare its checksums.

    Names are the keys of the model's state_dict. A shared parameter or buffer is written once, under its first name, as
    Hugging Face does; every_name: under each of its names. Needs host memory for a part of one parameter. `out` appears
    complete or not at all. Raises CheckpointError, OutOfSpaceError or UsageError before anything is written.
    """
    out, checkpoint = Path(out), Path(checkpoint)
    folder = checkpoint if tag is None and (checkpoint / INDEX).is_file() else find(checkpoint, tag)
    target_dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    index = read_index(folder)
    check_files(index, folder)
    _check_quantised(index)
    tensors = _tensors(index, folder, target_dtype)
    if every_name:
        tensors |= {alias: tensors[name] for alias, name in index.aliases.items() if name in tensors}
    shards = _shards(tensors, parse_size(max_shard_size))
    others = _others(Path(config_from)) if config_from is not None else []
    dtypes = {name: tensors[name].spec.dtype for name in index.parameters}
    floating = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    config = next((with_dtype(file, floating) for file in others if file.name == CONFIG), None)
    check_out(out, _nbytes(*shards) + sum(file.stat().st_size for file in others))
    if verify:
        step(0, "comparing checksums")
        check_contents(index, folder)
    with appearing(out) as incomplete:
        _write(incomplete, shards, step)
        for file in others:
            shutil.copyfile(file, incomplete / file.name)
        if config is not None:
            (incomplete / CONFIG).write_bytes(config)
    return out


def config_beside(checkpoint: Path) -> Path | None:
    """Return the folder with the config.json that a Trainer writes beside a checkpoint: `checkpoint`, or the one above
    the folder of a tag. None if no Trainer wrote it: another folder's files are not published unasked.
    """
    folders = [checkpoint, *([checkpoint.absolute().parent] if (checkpoint / INDEX).is_file() else [])]
    names = (CONFIG, "training_args.bin")
    return next((folder for folder in folders if all((folder / name).is_file() for name in names)), None)


def is_exported(folder: Path) -> bool:
    """Return whether a folder has a model's weights, as `save_model` writes them, and no checkpoint."""
    weights = any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
    return weights and not any((folder / name).exists() for name in (LATEST, INDEX))


def _check_quantised(index: Index) -> None:
    """Raise CheckpointError for a weight of bitsandbytes: a checkpoint holds codes and scales, and not their format."""
    for name in index.parameters:
        weight = name.rpartition(".")[0]
        if weight in index.parameters:
            raise CheckpointError(
                f"{weight} is a quantised weight with the scales {name}, and the checkpoint does not hold its format: "
                "load it into an engine, and call engine.save_16bit_model(), also for adapters alone "
                "(exclude_frozen_parameters=True)"
            )


def _tensors(index: Index, folder: Path, dtype: torch.dtype | None) -> _Shard:
    """Return the parameters in the model's order, then the buffers."""
    by_name: _Shard = {}
    shards = open_shards(index, folder) if index.shards else None
    dtypes = {name: entry.torch_dtype for name, entry in index.parameters.items()}
    narrow = [name for name, own in dtypes.items() if own.is_floating_point and own.itemsize < 2]
    of_codes = {name.rpartition(".")[0] for name in narrow}
    for name, entry in index.parameters.items():
        own = entry.torch_dtype
        kind = index.kinds(name)[0]  # the master, or a frozen parameter itself
        # Float8 values without their scales would mean something else, and so would other scales.
        casts = own.is_floating_point and name.rpartition(".")[0] not in of_codes
        spec = Spec(dtype if dtype is not None and casts else own, entry.shape)
        if shards is not None:
            by_name[name] = _Tensor(partial(shards.parts, name, kind), spec)
        else:
            by_name[name] = _Tensor(partial(_parts, folder / entry.file, key(kind.name, name)), spec)
    path = folder / BUFFERS
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not iterable
                by_name[name] = _Tensor(partial(_parts, path, name), spec_of(tensors, name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged, use another one") from None
    return by_name


def _parts(file: Path, key: str) -> Iterator[torch.Tensor]:
    # Opened for each tensor, since pages that were read stay mapped until the file is closed.
    with safe_open(file, framework="pt") as tensors:
        yield from parts_of(tensors, key)


def _shards(tensors: _Shard, limit: int) -> list[_Shard]:
    """Return shards of at most `limit` bytes, in order. A larger tensor gets a shard of its own."""
    if limit <= 0:
        raise UsageError(f"max_shard_size is {limit}: pass a positive size, such as 5GB")
    shards: list[_Shard] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _nbytes(shards[-1]) + tensor.spec.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _nbytes(*shards: _Shard) -> int:
    return sum(tensor.spec.nbytes for shard in shards for tensor in shard.values())


def _others(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that hold no weights.

    Raises UsageError if one is a link to a file elsewhere, which would be published with the export. Links of Hugging
    Face's cache lead from snapshots/REVISION to its blobs.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: pass one with the model's config.json")
    files = (path for path in folder.iterdir() if path.is_file() and path.name not in _OF_THE_RUN)
    found = sorted(path for path in files if not path.name.endswith(_WEIGHT_SUFFIXES))
    real = folder.resolve()
    within = [real, real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [real]
    for path in found:
        if path.is_symlink() and not any(path.resolve().is_relative_to(each) for each in within):
            raise UsageError(f"{path} is a link to {path.resolve()}, outside of the folder: copy the file there")
    return found


def _write(folder: Path, shards: Sequence[_Shard], step: Step) -> None:
    total, done = _nbytes(*shards), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"

        def parts(name: str, shard: _Shard = shard, file: str = file) -> Iterator[torch.Tensor]:
            nonlocal done
            tensor = shard[name]
            for part in tensor.parts():
                converted = _convert(part, tensor.spec.dtype, name)
                yield converted
                done += converted.nbytes
                step(done / max(total, 1), f"writing {file}; {done / 1e9:.2f} of {total / 1e9:.2f} GB")

        write_tensors(folder / file, {name: tensor.spec for name, tensor in shard.items()}, parts, _METADATA)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _convert(part: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if part.dtype == dtype:
        return part
    if dtype == torch.bfloat16:
        return split_master(part.float())[0]
    converted = part.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), part.isfinite()):
        raise CheckpointError(f"{name} has values outside the range of fp16: export it as bf16 or fp32")
    return converted

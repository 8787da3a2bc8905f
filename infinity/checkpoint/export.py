"""Export: a checkpoint becomes the safetensors files that Hugging Face's `from_pretrained` reads, part by part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from infinity.checkpoint.format import BUFFERS, INDEX, Index, find, key, read_index
from infinity.checkpoint.hf_config import CONFIG, with_dtype
from infinity.checkpoint.tensors import WEIGHTS, WEIGHTS_INDEX, Spec, parts_of, spec_of, write_tensors
from infinity.checkpoint.verify import check_contents, check_files
from infinity.errors import CheckpointError, OutOfSpaceError, UsageError
from infinity.optim.cpu_adam import split_master
from infinity.sizes import parse_size

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_METADATA = {"format": "pt"}
"""Without it, readers refuse the file."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")

Step = Callable[[float, str], None]
"""How much of the whole is done, from 0 to 1, and what goes on."""


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies in the checkpoint, and what it becomes."""

    file: Path
    key: str
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
    step: Step = lambda done, what: None,
) -> Path:
    """Write the parameters and persistent buffers of a checkpoint to the new folder `out`, as `from_pretrained` wants
    them.

    checkpoint: what was passed to `save_checkpoint`, with `tag` or the last one saved; or the checkpoint's own folder.
    dtype: "bf16", "fp16" or "fp32" for all parameters; by default what each computes in. Masters are rounded to bf16 as
    the engine does it (half away from zero), else cast. Buffers and integers stay as they are.
    config_from: a Hugging Face folder whose other files (config.json, the tokenizer's) are copied; config.json then
    names the dtype of the weights. verify: read the whole checkpoint once before, to compare its checksums.

    Names are those of the model's state_dict; a parameter that modules share is written once, under the first of its
    names. Host memory: a part of one parameter. `out` appears whole or not at all; CheckpointError, OutOfSpaceError or
    UsageError come before anything is written.
    """
    out, checkpoint = Path(out), Path(checkpoint)
    folder = checkpoint if tag is None and (checkpoint / INDEX).is_file() else find(checkpoint, tag)
    wanted = DTYPES[dtype] if isinstance(dtype, str) else dtype
    index = read_index(folder)
    check_files(index, folder)
    tensors = _tensors(index, folder, wanted)
    shards = _shards(tensors, parse_size(max_shard_size))
    others = _others(Path(config_from)) if config_from is not None else []
    dtypes = {name: tensors[name].spec.dtype for name in index.parameters}
    floating = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    config = next((with_dtype(file, floating) for file in others if file.name == CONFIG), None)
    _check_out(out, _nbytes(*shards) + sum(file.stat().st_size for file in others))
    if verify:
        step(0, "comparing checksums")
        check_contents(index, folder)
    with _appearing(out) as partial:
        _write(partial, shards, step)
        for file in others:
            shutil.copyfile(file, partial / file.name)
        if config is not None:
            (partial / CONFIG).write_bytes(config)
    return out


def _tensors(index: Index, folder: Path, dtype: torch.dtype | None) -> _Shard:
    """Parameters in the model's order, then buffers."""
    found: _Shard = {}
    for name, entry in index.parameters.items():
        own: torch.dtype = getattr(torch, entry.dtype)
        kind = index.kinds(name)[0]  # the master, or a frozen parameter itself
        spec = Spec(dtype if dtype is not None and own.is_floating_point else own, entry.shape)
        found[name] = _Tensor(folder / entry.file, key(kind.name, name), spec)
    path = folder / BUFFERS
    try:
        with safe_open(path, framework="pt") as tensors:
            found |= {name: _Tensor(path, name, spec_of(tensors, name)) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged, use another one") from None
    return found


def _shards(tensors: _Shard, limit: int) -> list[_Shard]:
    """In order; a tensor that is larger than `limit` has a shard of its own."""
    if limit <= 0:
        raise UsageError(f"max_shard_size is {limit}: give a size, as 5GB")
    shards: list[_Shard] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _nbytes(shards[-1]) + tensor.spec.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _nbytes(*shards: _Shard) -> int:
    return sum(tensor.spec.nbytes for shard in shards for tensor in shard.values())


def _others(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold no weights."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name one with the model's config.json")
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES))


def _check_out(out: Path, nbytes: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already and not an empty folder: name a new one")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(above).free
    if nbytes > free:
        raise OutOfSpaceError(str(above), nbytes, free, "free some, or export to another drive")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends, and is gone when the block fails."""
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(folder: Path, shards: Sequence[_Shard], step: Step) -> None:
    total, done = _nbytes(*shards), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"

        def parts(name: str, shard: _Shard = shard, file: str = file) -> Iterator[torch.Tensor]:
            nonlocal done
            tensor = shard[name]
            # Opened for each tensor, since what was read of a file stays mapped until it is closed.
            with safe_open(tensor.file, framework="pt") as tensors:
                for part in parts_of(tensors, tensor.key):
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
        raise CheckpointError(f"{name} has values that fp16 does not reach: export it as bf16 or fp32")
    return converted

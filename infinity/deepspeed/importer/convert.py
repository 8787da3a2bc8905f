"""Writes a DeepSpeed checkpoint as one of Infinity, which `engine.load_checkpoint` loads with the same states.

Values are copied in parts, so that memory holds a part of one parameter. The output appears complete or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.export import Step
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, Entry, Index, key
from infinity.checkpoint.save import pack_client_state
from infinity.checkpoint.tensors import PART, Spec
from infinity.checkpoint.writer import Writer, appearing, check_out
from infinity.deepspeed.importer.files import Inert, PickleFile
from infinity.deepspeed.importer.optimizer import groups_of, loss_scale_of, optimizer_of, scheduler_of
from infinity.deepspeed.importer.states import (
    DAMAGED,
    StoredCheckpoint,
    damage_named,
    latest_folder,
)
from infinity.deepspeed.importer.unsharded import is_universal, read_universal
from infinity.deepspeed.importer.zero import read_zero
from infinity.errors import CheckpointError
from infinity.rules import MomentFormat, Rule

_FILE_BYTES = 1 << 30
"""Parameters share a file up to this size."""

_OF_DEEPSPEED = frozenset(
    {
        "module",
        "optimizer",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "universal_checkpoint_info",
        "folding",
        "ds_config",
        "ds_version",
    }
)
"""Keys of *_model_states.pt that are DeepSpeed's. Others are the client_state."""


def import_deepspeed(
    directory: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    optimizer: str | None = None,
    step: Step = lambda done, what: None,
) -> Path:
    """Write a DeepSpeed checkpoint to the new folder `out`, and return out/tag. `load_checkpoint(out)` loads it.

    Reads ZeRO stages 0 to 3, saved by any number of ranks, and universal checkpoints. directory: the one given to
    DeepSpeed's `save_checkpoint`, or one checkpoint in it. tag: by default the last one. optimizer: its type as in a
    config, needed only if the checkpoint does not show it.

    Masters, moments, step counts, buffers, learning rates, loss scale and client_state are imported bit for bit. Runs
    no code of the checkpoint. Raises CheckpointError, UsageError or OutOfSpaceError, and leaves nothing at `out`.
    """
    out = Path(out)
    stored = read_deepspeed(directory, tag)
    with damage_named(stored.folder):
        plain = _Plain(stored.tensors_of)
        rule = optimizer_of(stored, optimizer)
        groups = groups_of(stored, rule, plain)
        moments = _moment_format(stored)
        tensors = _tensors(stored, rule, moments)
        shards = packed(tensors, _FILE_BYTES)
        files = {f"unit-{number:05d}.safetensors": names for number, names in enumerate(shards)}
        index = Index(
            global_steps=_count(stored, "global_steps"),
            parameters=_entries(stored, files),
            file_bytes={},
            optimizer=rule.type,
            param_groups=groups,
            lr_scheduler=scheduler_of(stored, groups, plain),
            moments=moments,
            skipped_steps=_count(stored, "skipped_steps"),
            loss_scale=loss_scale_of(stored),
            aliases=stored.aliases,
        )
        client_state = pack_client_state(plain.client_state(stored))
    total = sum(spec.nbytes for specs in tensors.values() for spec in specs.values())
    check_out(out, total)
    target = stored.folder.name
    with appearing(out) as folder:
        writer = Writer(folder, target)
        writer.open()
        done = 0
        for file, names in files.items():
            step(done / max(total, 1), f"writing {file}; {done / 1e9:.2f} of {total / 1e9:.2f} GB")
            specs = {each: spec for name in names for each, spec in tensors[name].items()}
            writer.write_parts(file, specs, partial(_parts, stored, specs))
            done += sum(spec.nbytes for spec in specs.values())
        buffers = {name: tensor.read().view(tensor.shape) for name, tensor in stored.buffers.items()}
        writer.write(BUFFERS, buffers)
        writer.write_raw(CLIENT_STATE, client_state)
        writer.finish(index)
    return out / target


def read_deepspeed(directory: str | Path, tag: str | None = None) -> StoredCheckpoint:
    """Return a DeepSpeed checkpoint of any layout; see `import_deepspeed`. Reads no values of parameters."""
    folder = latest_folder(Path(directory), tag)
    with damage_named(folder):
        return read_universal(folder) if is_universal(folder) else read_zero(folder)


def _count(stored: StoredCheckpoint, name: str) -> int:
    value = stored.progress.get(name)
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{stored.folder}: {name} is {value!r}, and a count is expected: {DAMAGED}")
    return value


def _moment_format(stored: StoredCheckpoint) -> MomentFormat:
    """Return "bf16" if all moments are, as with bf16_optimizer_states, else "fp32"."""
    dtypes = {
        state.dtype
        for parameter in stored.parameters.values()
        for name, state in parameter.states.items()
        if name not in ("master", "param")
    }
    wide = dtypes - {torch.float32, torch.bfloat16, torch.float16}
    if wide:
        raise CheckpointError(
            f"{stored.folder} holds moments in {wide.pop()}, which would be rounded: save them in fp32"
        )
    return "bf16" if dtypes == {torch.bfloat16} else "fp32"


def _tensors(stored: StoredCheckpoint, rule: Rule, moments: MomentFormat) -> dict[str, dict[str, Spec]]:
    """Return parameter → tensors that are written for it, in the order of the model. Raises CheckpointError if a
    moment is missing after updates.
    """
    dtype = torch.bfloat16 if moments == "bf16" else torch.float32
    updates = _updates(stored)
    tensors = {}
    for name in stored.names:
        parameter = stored.parameters.get(name)
        if parameter is None:  # a buffer or an alias
            continue
        if not parameter.trained:
            tensors[name] = {key("param", name): Spec(parameter.dtype, parameter.shape)}
            continue
        if parameter.states["master"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"{stored.folder}: the master of {name} is in {parameter.states['master'].dtype}: {DAMAGED}"
            )
        # SGD without momentum has no buffer, and a parameter without a gradient so far has no moments.
        absent = set(rule.moments) - parameter.states.keys()
        if absent and rule.counts_steps and (parameter.step or (parameter.step is None and updates)):
            raise CheckpointError(f"{stored.folder}: {name} has no {min(absent)} after {updates} updates: {DAMAGED}")
        tensors[name] = {key("master", name): Spec(torch.float32, parameter.shape)}
        tensors[name] |= {key(moment, name): Spec(dtype, parameter.shape) for moment in rule.moments}
    if not any(parameter.trained for parameter in stored.parameters.values()):
        raise CheckpointError(
            f"{stored.folder} has no trained parameter: read its weights with infinity.integrations.zero_to_fp32"
        )
    return tensors


def _updates(stored: StoredCheckpoint) -> int:
    return _count(stored, "global_steps") - _count(stored, "skipped_steps")


def packed(tensors: Mapping[str, Mapping[str, Spec]], limit: int) -> list[list[str]]:
    """Return the names for each file of at most `limit` bytes, in order. A larger entry gets a file of its own."""
    files: list[list[str]] = [[]]
    size = 0
    for name, specs in tensors.items():
        nbytes = sum(spec.nbytes for spec in specs.values())
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _entries(stored: StoredCheckpoint, files: Mapping[str, list[str]]) -> dict[str, Entry]:
    entries = {}
    for file, names in files.items():
        for name in names:
            parameter = stored.parameters[name]
            step = parameter.step if parameter.trained else 0
            if step is None:  # an optimizer without a count, such as SGD; or a parameter that has no moments yet
                step = _updates(stored) if len(parameter.states) > 1 else 0
            dtype = str(parameter.dtype).removeprefix("torch.")
            entries[name] = Entry(parameter.shape, dtype, parameter.trained, file, step)
    return entries


def _parts(stored: StoredCheckpoint, specs: Mapping[str, Spec], each: str) -> Iterator[torch.Tensor]:
    """Yield the values of a tensor of the output, named as in its file."""
    state, _, name = each.partition("/")
    parameter, dtype = stored.parameters[name], specs[each].dtype
    if state in parameter.states:
        yield from parameter.states[state].parts(dtype)
        return
    numel = prod(parameter.shape)
    for start in range(0, numel, PART):
        yield torch.zeros(min(PART, numel - start), dtype=dtype)


class _Plain:
    """Converts values of a pickle to numbers, strings, tensors and containers of them. Tensors are read.

    Paths become strings, enum members their values, namespaces dicts. Keeps shared values shared.
    """

    def __init__(self, file: PickleFile | None) -> None:
        self._file = file
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        made = self._convert(value)
        self._made[id(value)] = (value, made)  # the value too, so that its id is not used again
        return made

    def client_state(self, stored: StoredCheckpoint) -> dict[str, Any]:
        """Return what the caller of DeepSpeed's `save_checkpoint` passed as client_state."""
        try:
            return {name: self(value) for name, value in stored.progress.items() if name not in _OF_DEEPSPEED}
        except RecursionError:
            raise CheckpointError(
                f"{stored.folder}: client_state is nested too deeply, or contains itself: save it without that"
            ) from None

    def _convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            assert self._file is not None
            place = self._file.place(value, "a tensor of client_state")
            return place.read().view(place.shape)
        if isinstance(value, Inert):
            if type(value).__name__.endswith("Path"):
                return "/".join(str(part) for part in value.arguments).replace("//", "/", 1)
            if type(value).__name__.endswith("Enum") and len(value.arguments) == 1:
                return self(value.arguments[0])
            return {str(name): self(own) for name, own in value.attributes.items()}
        if isinstance(value, dict):
            return {name: self(own) for name, own in value.items()}
        if isinstance(value, (list, tuple, set)):
            made = [self(own) for own in value]
            return made if isinstance(value, list) else type(value)(made)
        return value

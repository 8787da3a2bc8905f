"""Contents of a DeepSpeed checkpoint, independent of its layout: parameters, their states, buffers and progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import candidates, check_folder
from infinity.checkpoint.tensors import PART
from infinity.deepspeed.importer.files import FileTensor, Inert, PickleFile
from infinity.errors import CheckpointError, InfinityError
from infinity.inputs import is_file_name, read_input

_LATEST = "latest", "latest_universal"
_CONTENT = "*_model_states.pt"
"""Files of every checkpoint, of all stages and universal ones."""
_LARGEST_TAG = 4096
"""Bytes of the file `latest`."""
DAMAGED = "the checkpoint is damaged or incomplete, use another one"


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a flattened tensor in a file."""

    tensor: FileTensor
    start: int
    stop: int


@dataclass(frozen=True)
class Computed:
    """The parameter that the model computes with: its master rounded to nearest, with ties to even.

    They agree after every step of DeepSpeed, which copies masters to the model, and after a skipped step, which changes
    neither.
    """

    name: str
    tensor: FileTensor

    def matches(self, master: torch.Tensor, start: int) -> bool:
        """Return True if `master`, elements from `start` on, rounds to the same values. All NaNs are equal."""
        own = self.tensor.read(start, start + master.numel())
        rounded = master.to(own.dtype)
        return bool(((rounded == own) | (rounded.isnan() & own.isnan())).all())


@dataclass(frozen=True)
class StoredState:
    """One state of a parameter: consecutive ranges, which ranks saved in their own files."""

    ranges: tuple[Range, ...]
    shape: tuple[int, ...]
    computed: Computed | None = None
    """For masters in stages 1 and 2: the parameter that they are compared with when they are read."""

    @classmethod
    def whole(
        cls, tensor: FileTensor, shape: tuple[int, ...] | None = None, computed: Computed | None = None
    ) -> StoredState:
        shape = tensor.shape if shape is None else shape
        return cls((Range(tensor, 0, tensor.numel),), shape, computed)

    @property
    def numel(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def dtype(self) -> torch.dtype:
        return self.ranges[0].tensor.dtype if self.ranges else torch.float32

    def parts(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements in order, at most `PART` at once. dtype: cast to it.

        Raises CheckpointError if masters do not round to the model's values.
        """
        done = 0
        for each in self.ranges:
            for start in range(each.start, each.stop, PART):
                values = each.tensor.read(start, min(start + PART, each.stop))
                computed = self.computed
                if computed is not None and not computed.matches(values, done):
                    raise CheckpointError(
                        f"{each.tensor.file}: the masters of {computed.name} do not round to its values in "
                        f"{computed.tensor.file}: files of ranks were swapped, or are of another step or run; copy all "
                        "files of the checkpoint again. If the script itself wrote to parameters before the save, "
                        "train one step more with DeepSpeed, and save again"
                    )
                done += values.numel()
                yield values if dtype is None else values.to(dtype)

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the whole state in its shape."""
        parts = list(self.parts(dtype))
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype or self.dtype)
        return flat.view(self.shape)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter. A trained one has the state "master" and its moments, a frozen one the state "param"."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the parameter in the forward."""
    states: Mapping[str, StoredState]
    step: int | None = None
    """Number of its updates; None if its optimizer does not count them."""

    @property
    def trained(self) -> bool:
        return "master" in self.states


@dataclass(frozen=True)
class StoredCheckpoint:
    """A DeepSpeed checkpoint whose files have been found and whose sizes add up."""

    folder: Path
    parameters: dict[str, StoredParameter]
    """By name, without the aliases of shared parameters; in the order of zero_to_fp32: frozen, then trained ones."""
    names: tuple[str, ...]
    """Names of the model's state_dict, in its order."""
    buffers: dict[str, FileTensor]
    aliases: dict[str, str]
    """Other names of shared parameters → the name that holds the values."""
    param_groups: list[dict[str, Any]]
    """Hyper-parameters, as DeepSpeed saved them."""
    progress: Mapping[str, Any]
    """The file of the model's states, without the model: step counts, scheduler, config and client state."""
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the loss scaler."""
    tensors_of: PickleFile | None = None
    """The file in which tensors of `progress` lie."""


def latest_folder(directory: Path, tag: str | None) -> Path:
    """Return the folder of one checkpoint. directory: the one given to `save_checkpoint`, or that folder itself.

    tag: None selects the tag in `latest`, or in `latest_universal`.
    """
    check_folder(directory, "pass the folder given to DeepSpeed's save_checkpoint")
    found = partial(candidates, directory, _CONTENT, _LATEST)
    if tag is None:
        latest = next((name for name in _LATEST if (directory / name).is_file()), None)
        if latest is None and any(directory.glob(_CONTENT)):
            return directory
        if latest is None:
            fix = found() or "pass the folder given to DeepSpeed's save_checkpoint"
            raise CheckpointError(f"{directory} has no file {_LATEST[0]!r} and no {_CONTENT}: {fix}")
        tag = _tag_in(inside(directory, latest))
    if not is_file_name(tag) or "\\" in tag:
        raise CheckpointError(
            f"{directory}: the tag {tag!r} is not the name of a folder in it: pass the tag of a checkpoint"
        )
    folder = inside(directory, tag)
    if not folder.is_dir():
        fix = found() or "it holds none; pass the folder given to DeepSpeed's save_checkpoint"
        raise CheckpointError(f"there is no checkpoint {tag!r} in {directory}: {fix}")
    return folder


def _tag_in(file: Path) -> str:
    try:
        return read_input(file, _LARGEST_TAG).decode("utf-8", errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): pass the tag of a checkpoint") from None


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turn errors that invalid values in a checkpoint cause in the block into CheckpointError."""
    try:
        yield
    except InfinityError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error}): {DAMAGED}") from error


def inside(folder: Path, name: str) -> Path:
    """Return folder/name. Raises CheckpointError if the path, or a symbolic link there, leads out of the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path} leads to {path.resolve()}, outside of {folder}: copy the file there")
    return path


def entry(content: Any, key: str, kind: type | tuple[type, ...], path: Path) -> Any:
    """Return content[key]. Raises CheckpointError if it is missing or of another type."""
    if not isinstance(content, Mapping) or not isinstance(content.get(key), kind):
        found = "missing" if not isinstance(content, Mapping) or key not in content else type(content[key]).__name__
        expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise CheckpointError(f"{path}: {key!r} is {found}, and a {expected} is expected: {DAMAGED}")
    return content[key]


def shape_of(value: Any, name: str, path: Path) -> tuple[int, ...]:
    """Return a saved shape as a tuple of ints."""
    if isinstance(value, Sequence) and all(isinstance(size, int) and size >= 0 for size in value):
        return tuple(value)
    raise CheckpointError(f"{path}: the shape of {name} is {value!r}, and a list of sizes is expected: {DAMAGED}")


def shapes_of(content: Any, path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Return name → shape of the trained parameters, by group (by sub-group in stage 3)."""
    groups = entry(content, "param_shapes", list, path)
    seen: set[str] = set()
    for group in groups:
        if not isinstance(group, dict) or seen & group.keys() or not all(isinstance(name, str) for name in group):
            raise CheckpointError(f"{path}: param_shapes lists a parameter twice, or is of another type: {DAMAGED}")
        seen |= group.keys()
    return [{name: shape_of(shape, name, path) for name, shape in group.items()} for group in groups]


def numbers_of(groups: list[Any], path: Path) -> list[tuple[Any, Any]]:
    """Return (group, number of a parameter in the optimizer's state) for every parameter of param_groups."""
    return [(group, number) for group in groups for number in entry(group, "params", list, path)]


def step_of(value: Any, file: PickleFile) -> int:
    """Return a step count, which optimizers save as an int or as a tensor."""
    if isinstance(value, torch.Tensor):
        value = file.place(value, "step").read().tolist()
        value = value[0] if len(value) == 1 else value
    if isinstance(value, (int, float)) and value >= 0 and value == int(value):
        return int(value)
    raise CheckpointError(f"{file.path}: step is {value!r}, and a count is expected: {DAMAGED}")


def part_of(numel: int, rank: int, ranks: int) -> int:
    """Return the number of elements of a parameter in a rank's part in stage 3, without the padding."""
    part = ceil(numel / ranks)
    return min(part, max(0, numel - rank * part))


def loss_scaler(content: Any) -> dict[str, Any]:
    """Return the attributes of the loss scaler in an optimizer's state."""
    scaler = content.get("loss_scaler")
    return scaler.attributes if isinstance(scaler, Inert) else {}


def check_numel(state: StoredState, name: str, path: Path) -> StoredState:
    """Return `state`. Raises CheckpointError if its files hold another number of elements than its shape."""
    if state.numel != prod(state.shape):
        raise CheckpointError(
            f"{path}: {name} has shape {list(state.shape)}, {prod(state.shape):,} elements, and the files hold "
            f"{state.numel:,} of them: {DAMAGED}"
        )
    return state

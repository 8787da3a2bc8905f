"""The checkpoint format: file names, versions, and the index that maps each parameter to its file."""

from __future__ import annotations

import glob
import json
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import torch
from torch import nn

from infinity.checkpoint.tensors import DTYPES
from infinity.comm.dtensor import is_dense, local
from infinity.errors import CheckpointError
from infinity.inputs import is_file_name, member, parse_json, read_input
from infinity.plan.formats import StateKind, moment_kinds
from infinity.rules import MomentFormat, RuleName
from infinity.units.compiled import own_name

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = "infinity-checkpoint"
VERSION = 4
SHARDED_VERSION = 5
"""Version of a checkpoint whose states are in files of ranks (`infinity.checkpoint.committed`)."""
ALIASES_VERSION = 6
"""Version of a checkpoint of a model with shared parameters or buffers, whose further names the index holds."""
RULES_VERSION = 7
"""Version of a checkpoint with states of rules in Python, which the index lists for each parameter."""
_READ_TOO = (1, 2, 3)
"""Older versions that are readable. 1 does not record that its moments are fp32, 2 has no checksums and no RNG states,
3 has no checksum of the index itself.
"""
INDEX = "checkpoint.json"
LATEST = "latest"
CLIENT_STATE = "client_state.pt"
BUFFERS = "buffers.safetensors"
_LARGEST_TAG = 4096
"""Bytes of the file `latest`."""
_SHOWN = 8
"""Largest number of folders that an error lists; the last ones are shown."""


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_CHECKS: dict[str, Any] = {"strict": True, "extra": "forbid"}
"""For pydantic, which compares the content of an index with the annotations here."""


SavedStatesOf = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of each state of a parameter that a rule in Python updates."""


def own_states(kinds: Sequence[StateKind]) -> SavedStatesOf:
    """Return the entry of the states `kinds`, of which the first is the master."""
    return tuple((kind.name, _name_of(kind.dtype), kind.shape or ()) for kind in kinds[1:])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """Index entry of a parameter. dtype: the one it computes in. file: holds its states. step: number of updates."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    file: str
    step: int
    group: int | None = None
    """Number of its param_group; -1 for none. None: not recorded, as in checkpoints of other libraries."""
    states: SavedStatesOf | None = None
    """Its states if a rule in Python updates it; None: those of the native rule `Index.rule`."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class Progress:
    """Counters, hyper-parameters and schedules after a step, as a commit records them and an `Index` has them."""

    global_steps: int
    skipped_steps: int
    param_groups: list[dict[str, Any]]
    """Hyper-parameters by group, without the parameters."""
    lr_scheduler: dict[str, Any] | None
    loss_scale: dict[str, Any] | None


@dataclass(frozen=True)
class Index:
    """Content of `checkpoint.json`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    global_steps: int
    parameters: dict[str, Entry]
    file_bytes: dict[str, int]
    """Size of every file except the index itself."""
    optimizer: str
    param_groups: list[dict[str, Any]]
    lr_scheduler: dict[str, Any] | None
    moments: MomentFormat = "fp32"
    file_crc32: dict[str, int] = field(default_factory=dict)
    skipped_steps: int = 0
    loss_scale: dict[str, Any] | None = None
    """State of `infinity.engine.optimizer.loss_scale`; None without a loss scale."""
    shards: int = 0
    """Number of ranks with states in files of their own, as a durable run commits them (`states_file`); 0: states are
    in the file of each entry.
    """
    aliases: dict[str, str] = field(default_factory=dict)
    """Further name of a shared parameter or buffer → the name under which it is saved."""
    rule: str = ""
    """Native rule of the entries without `states`; empty: `optimizer`, which has no entry with them."""

    def kinds(self, name: str) -> tuple[StateKind, ...]:
        """Return a parameter's saved tensors: fp32 master and moments if trained, else the parameter itself."""
        entry = self.parameters[name]
        if not entry.trainable:
            return (StateKind("param", entry.torch_dtype),)
        if entry.states is not None:
            own = (StateKind(name, _DTYPES[dtype], shape=shape) for name, dtype, shape in entry.states)
            return (StateKind("master", torch.float32), *own)
        rule = cast(RuleName, (self.rule or self.optimizer).lower())
        return (StateKind("master", torch.float32), *moment_kinds(rule, self.moments))

    def to_json(self) -> str:
        content = json.loads(json.dumps(asdict(self)))  # keys become strings, as they will be read
        version = ALIASES_VERSION if self.aliases else SHARDED_VERSION if self.shards else VERSION
        if self.rule:
            version = RULES_VERSION
        else:
            del content["rule"]
            for entry in content["parameters"].values():
                del entry["states"]
        if version < ALIASES_VERSION:
            del content["aliases"]
        if version < SHARDED_VERSION:
            del content["shards"]
        return json.dumps({"format": FORMAT, "version": version, "crc32": crc32_of(content), **content}, indent=1)


def crc32_of(content: dict[str, Any]) -> int:
    """Return the CRC-32 of a JSON object, independent of whitespace and key order."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNPICKLER = re.compile(r"WeightsUnpickler error:\s*(.+?)(?: was not an allowed global by default|\n|$)")


def reason(error: BaseException) -> str:
    """Return the cause of a failed `torch.save` or `torch.load` in one line of plain text.

    `torch.load(weights_only=True)` raises a page with terminal colours, most of it advice on trusting the file.
    """
    text = _ANSI.sub("", str(error)).strip()
    found = _UNPICKLER.search(text)
    text = found[1] if found is not None else text.partition("\n")[0]
    return text or type(error).__name__


def key(state: str, name: str) -> str:
    """Return the name of a parameter's state in a safetensors file."""
    return f"{state}/{name}"


def states_file(number: int) -> str:
    """Return the name of a rank's states in a checkpoint with `Index.shards`."""
    return f"states-{number:05d}.bin"


def layout_file(number: int) -> str:
    """Return the name of the layout of a rank's states."""
    return f"layout-{number:05d}.json"


def read_index(folder: Path) -> Index:
    """Return the index of the checkpoint in `folder`. Raises CheckpointError if it is missing or damaged.

    File names in it are names of files in `folder`.
    """
    path = file_in(folder, INDEX)
    try:
        content = parse_json(read_input(path))
    except FileNotFoundError:
        fix = "pass the folder given to save_checkpoint"
        if any(folder.glob("*_states.pt")):
            fix = "it is DeepSpeed's, convert it with `infinity import-deepspeed`"
        raise CheckpointError(f"{folder} holds no checkpoint ({INDEX} is missing): {fix}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged, use another one") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is not the index of an Infinity checkpoint")
    version = content.pop("version", None)
    if version not in (RULES_VERSION, ALIASES_VERSION, SHARDED_VERSION, VERSION, *_READ_TOO):
        raise CheckpointError(
            f"{path} has format version {version!r:.40}, this Infinity reads up to {RULES_VERSION}: use a newer "
            "Infinity"
        )
    crc32 = content.pop("crc32", None)
    if version not in _READ_TOO and crc32 != crc32_of(content):
        raise CheckpointError(f"{path} was altered since it was saved (its checksum differs): use another checkpoint")
    try:
        index = _checker().validate_json(json.dumps(content))
        problem = next(_problems(index, has_checksums=version not in _READ_TOO), "")
    except ValueError as error:  # pydantic's ValidationError, or text that UTF-8 has no bytes for
        problem = ", ".join(map(str.strip, str(error).splitlines()[1:3])) or str(error)
    if problem:
        raise CheckpointError(f"{path} lacks or misstates {problem}: the checkpoint is damaged, use another one")
    return index


@cache
def _checker() -> TypeAdapter[Index]:
    from pydantic import TypeAdapter

    return TypeAdapter(Index)


def _problems(index: Index, *, has_checksums: bool) -> Iterator[str]:
    """Yield what the types of fields do not show. has_checksums: the version has a checksum of every file."""
    yield from (f"the file name {file!r}" for file in index.file_bytes if not is_file_name(file))
    if index.parameters and (index.rule or index.optimizer).lower() not in get_args(RuleName):
        yield f"the optimizer, which is {(index.rule or index.optimizer)!r:.40}"
    for name, entry in index.parameters.items():
        for state, dtype, _ in entry.states or ():
            if dtype not in _DTYPES:
                yield f"the dtype of {state} of {name!r}, which is {dtype!r:.40}"
    counts = [index.global_steps, index.skipped_steps, *index.file_bytes.values(), *index.file_crc32.values()]
    counts += [count for entry in index.parameters.values() for count in (*entry.shape, entry.step)]
    counts += [n for entry in index.parameters.values() for *_, shape in entry.states or () for n in shape]
    yield from (f"a count, which is {count}" for count in counts if not 0 <= count < 1 << 63)
    yield from (f"the name {alias!r}, twice" for alias in index.aliases if alias in index.parameters)
    if BUFFERS not in index.file_bytes:
        yield f"the size of {BUFFERS}"
    if not 0 <= index.shards < len(index.file_bytes):
        yield f"a count, which is {index.shards}"
    else:
        files = (file for n in range(index.shards) for file in (states_file(n), layout_file(n)))
        yield from (f"the size of {file!r}" for file in files if file not in index.file_bytes)
    for name, entry in index.parameters.items():
        if entry.file not in index.file_bytes:
            yield f"the size of {entry.file!r}, the file of {name!r}"
        if entry.dtype not in _DTYPES:
            yield f"the dtype of {name!r}, which is {entry.dtype!r:.40}"
    if has_checksums:
        for file in (CLIENT_STATE, *index.file_bytes):
            if file not in index.file_bytes or file not in index.file_crc32:
                yield f"size or checksum of {file!r}"


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file. Raises CheckpointError if a symbolic link leads out of the folder."""
    try:
        return member(folder, name)
    except ValueError as error:
        raise CheckpointError(f"{error}: copy the file there, or use another checkpoint") from None


def read_tag(file: Path) -> str:
    """Return the tag in a file like `latest`. Raises OSError, and CheckpointError if it names no folder beside it."""
    content = read_input(file, _LARGEST_TAG)
    tag = content.decode("utf-8", errors="replace").strip()
    if not is_file_name(tag):
        raise CheckpointError(f"{file} holds {tag!r:.100}, which is not the name of a folder beside it: pass a tag")
    return tag


def find(directory: Path, tag: str | None) -> Path:
    """Return the folder of the checkpoint `tag`; None selects the tag in `latest`.

    Raises CheckpointError if `directory` or the checkpoint is missing.
    """
    check_folder(directory, "pass the folder given to save_checkpoint")
    if tag is None:
        try:
            tag = read_tag(directory / LATEST)
        except FileNotFoundError:
            fix = candidates(directory, INDEX, (LATEST,)) or "no checkpoint was saved there; pass another folder"
            if (directory / INDEX).is_file():
                fix = f"it is a checkpoint itself: pass {str(directory.parent)!r} and tag={directory.name!r}"
            raise CheckpointError(f"{directory} has no file {LATEST!r}: {fix}") from None
        except OSError as error:
            raise CheckpointError(
                f"{directory / LATEST} cannot be read ({error.strerror}): pass the tag of a checkpoint"
            ) from None
    folder = directory / tag
    if not folder.is_dir():
        # A save of the same tag was killed between its two renames. The checkpoint it was replacing is intact.
        for former in sorted(directory.glob(f".{glob.escape(tag)}.replaced-*")):
            return former
        fix = candidates(directory, INDEX, (LATEST,)) or "it holds no checkpoint; pass another folder"
        raise CheckpointError(f"there is no checkpoint {tag!r} in {directory}: {fix}")
    return folder


def check_folder(directory: Path, fix: str) -> None:
    """Raise CheckpointError, which ends with `fix`, unless `directory` is a folder."""
    try:
        if stat.S_ISDIR(directory.stat().st_mode):
            return
        problem = "is not a folder"
    except FileNotFoundError:
        problem = "does not exist"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise CheckpointError(f"{directory} {problem}: {fix}")


def candidates(directory: Path, content: str, latest: Sequence[str]) -> str:
    """Return a text that lists the checkpoints in `directory`, or else the folders of runs in it; empty without any.

    content: pattern of a file of each checkpoint. latest: names of files that hold the tag of a run's last checkpoint.
    """
    if tags := _folders_with(directory, content):
        return f"it holds the checkpoints {_listed(tags)}; pass one as the tag"
    if runs := sorted({name for file in latest for name in _folders_with(directory, file)}):
        return f"the checkpoints are in its folders {_listed(runs)}; pass one of these folders"
    return ""


def _folders_with(directory: Path, pattern: str) -> list[str]:
    """Return the visible folders in `directory` that hold a file like `pattern`, "step9" before "step10"."""
    names = {path.parent.name for path in directory.glob(f"*/{pattern}")}
    return sorted((name for name in names if not name.startswith(".")), key=lambda name: (len(name), name))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[-_SHOWN:]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} others"


def names_of_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name → buffer for the buffers in a state_dict, a shared one under each of its names.

    Names omit the wrappers that `torch.compile` adds.
    """
    return {
        own_name(f"{path}.{name}" if path else name): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `names_of_buffers`, a shared one under its first name only."""
    first = {id(buffer): name for name, buffer in reversed(names_of_buffers(model).items())}
    return {name: buffer for name, buffer in names_of_buffers(model).items() if first[id(buffer)] == name}


def buffers_in_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of `persistent_buffers` in host memory. Raises CheckpointError for one that is not dense."""
    buffers = persistent_buffers(model)
    for name, buffer in buffers.items():
        with torch._C.DisableTorchFunctionSubclass():
            if not is_dense(local(buffer)):
                raise CheckpointError(
                    f"buffer {name} is a {type(buffer).__name__} of layout {buffer.layout}, dtype {buffer.dtype}, "
                    "without dense values in memory, which a checkpoint cannot hold: register it with "
                    "persistent=False, and save it beside the checkpoint"
                )
    return {name: buffer.detach().cpu().contiguous().clone() for name, buffer in buffers.items()}


def aliases_of_buffers(model: nn.Module) -> dict[str, str]:
    """Return further name of a shared buffer → its name in `persistent_buffers`."""
    first = {id(buffer): name for name, buffer in persistent_buffers(model).items()}
    return {name: first[id(b)] for name, b in names_of_buffers(model).items() if first[id(b)] != name}

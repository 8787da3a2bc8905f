"""Reads one file that DeepSpeed's `torch.save` wrote, without executing code of its pickle and without reading tensors.

The pickle goes through torch's weights-only unpickler. Tensors are constructed on the meta device, and every storage is
compared with the size of its record in the archive; values are read later, in parts, from their place in the file.
Names of classes are compared with a fixed list before unpickling starts. Classes of DeepSpeed on that list are replaced
by inert stand-ins, even if DeepSpeed is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.archive import OF_TORCH, first_unknown, only_safe, read_archive, unpickle
from infinity.checkpoint.format import reason
from infinity.errors import CheckpointError
from infinity.inputs import open_input


class Inert:
    """Stand-in for an object of another library: constructor arguments and attributes, and no code."""

    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.attributes = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(f"an object of {type(self).__name__} has the state {state!r} instead of attributes")
        self.attributes = state


_OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler LossScaleConfig",
    "deepspeed.runtime.zero.config ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment fragment_address",
    "deepspeed.utils.tensor_fragment tensor_fragment",
    "deepspeed.checkpoint.universal_checkpoint SubparamShape",
    "argparse Namespace",
    "types SimpleNamespace",
    "pathlib PosixPath",
    "pathlib WindowsPath",
    "pathlib PurePosixPath",
    "pathlib Path",
    "pathlib._local PosixPath",
    "pathlib._local WindowsPath",
)
"""Classes that DeepSpeed, and scripts around it, leave in checkpoints."""


STAND_INS: dict[str, type[Inert]] = {
    f"{module} {name}": type(name, (Inert,), {"__module__": module, "__qualname__": name})
    for module, name in map(str.split, _OF_DEEPSPEED)
}


class AnyTensor(Inert):
    """Stand-in for torch.Tensor, whose constructor would allocate any size given in the file."""


def rebuild_plain(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor without its subclass and its attributes, in place of torch's `_rebuild_from_type_v2`."""
    if function not in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter):
        raise CheckpointError(f"a tensor with attributes is constructed by {function!r}: the file is damaged")
    return function(*arguments)


def parameter_plain(data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
    """Return a parameter without its attributes, in place of torch's `_rebuild_parameter_with_state`."""
    return torch._utils._rebuild_parameter(data, requires_grad, hooks)


_REPLACED: dict[str, Any] = {
    "torch Tensor": AnyTensor,
    "torch._tensor _rebuild_from_type_v2": rebuild_plain,
    "torch._utils _rebuild_parameter_with_state": parameter_plain,
}
"""Globals of torch → their replacements in the pickle. Stage 3 writes tensors with attributes (`ds_id`)."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, whose values start at byte `at`. `read` reads them."""

    file: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor, (stop - start,).

        A tensor that is not contiguous is read whole. Raises CheckpointError if the file became shorter.
        """
        stop = self.numel if stop is None else stop
        if self.is_contiguous or not self.numel:
            return self._elements(start, stop - start)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self._elements(0, span).as_strided(self.shape, self.stride).reshape(-1)[start:stop]

    def _elements(self, start: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.dtype)
        if count:
            target: Any = memoryview(values.view(torch.uint8).numpy().data)
            with open_input(self.file) as file:
                file.seek(self.at + start * self.dtype.itemsize)
                if file.readinto(target) != len(target):
                    raise CheckpointError(f"{self.file} ended early: it was changed while it was read, so start again")
        return values


@dataclass
class PickleFile:
    """The content of a file. Its tensors are on the meta device; `place` returns where one is stored."""

    path: Path
    content: Any = None
    _storages: dict[int, tuple[torch.UntypedStorage, int, int]] = field(default_factory=dict)
    """Address of a storage's C++ object → the storage, which keeps it alive, its place in the file and its bytes there.

    A meta storage grows with the tensors on it, so its own size may exceed that of the record.
    """

    def add(self, storage: torch.UntypedStorage, start: int) -> None:
        self._storages[storage._cdata] = storage, start, storage.nbytes()

    def place(self, tensor: object, name: str) -> FileTensor:
        """Return the place of a tensor, called `name` in errors.

        Raises CheckpointError if it is no tensor, or exceeds its storage.
        """
        if not isinstance(tensor, torch.Tensor):
            shown = "missing" if tensor is None else f"a {type(tensor).__name__}"
            raise CheckpointError(f"{self.path}: {name} is {shown}, and a tensor is expected: use another checkpoint")
        shape, stride, first = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        steps = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
        storage, start, stored = self._storages.get(tensor.untyped_storage()._cdata, (None, 0, 0))
        end = first + sum(steps) + 1 if prod(shape) else 0
        if storage is None or first < 0 or min(stride, default=0) < 0 or end * tensor.dtype.itemsize > stored:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, for which its storage of {stored:,} bytes is too small: "
                "the checkpoint is damaged, use another one"
            )
        return FileTensor(self.path, start + first * tensor.dtype.itemsize, tensor.dtype, shape, stride)


def read_pickle(path: Path) -> PickleFile:
    """Return the content of a file that `torch.save` wrote. Raises CheckpointError, and runs no code of the file."""
    try:
        return _read(path)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, copy all of its files") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be read: it is damaged, use another one") from None
    except Exception as error:  # noqa: BLE001 - the unpickler raises many classes
        raise CheckpointError(f"{path} cannot be read ({reason(error)}): it is damaged, use another one") from None


def _read(path: Path) -> PickleFile:
    with open_input(path) as file:
        archive = read_archive(file, path)
    _check_name(path, archive.name)
    unknown = first_unknown(archive.pickled, OF_TORCH | STAND_INS.keys())
    if unknown is not None:
        name = unknown.replace(" ", ".")
        raise CheckpointError(
            f"{path} refers to {name}, which no DeepSpeed checkpoint needs. Nothing of the file was executed. Save "
            f"the checkpoint without objects of {name} (in client_state, for example)."
        )
    found = PickleFile(path)

    def storage_of(start: int, nbytes: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(nbytes, device="meta")
        found.add(storage, start)
        return storage

    with only_safe([*STAND_INS.values(), *_REPLACED.values()]):
        found.content = unpickle(archive, storage_of, _REPLACED)
    return found


def _check_name(path: Path, saved_as: str) -> None:
    """Raise CheckpointError if the file was renamed, since names tell ranks, parameters and states apart.

    saved_as: top folder of the archive. torch.save names it after the file, or "archive" if it got no path.
    """
    if saved_as not in (path.stem, "archive"):
        raise CheckpointError(
            f"{path} was saved as {saved_as}{path.suffix}: files of ranks were swapped or renamed; give every file the "
            "name that it was saved under"
        )

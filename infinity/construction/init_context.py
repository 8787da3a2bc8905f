"""Construction of models that are larger than memory: `with infinity.Init(config): model = Model(...)`.

Parameters are spilled to files, so that memory holds only a few units. torch's hook reports each parameter that a
module registers; the module's dict of parameters reports each use. When the recently used parameters exceed a budget,
the least recently used are moved to a mapped file (`infinity.construction.mapped`) and their pages are dropped from
memory. They remain ordinary tensors: code may read them, edit them in place or through `.data`, copy or tie them. So
reports and moves affect memory only, never a result.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from infinity.construction.mapped import MappedFile
from infinity.errors import ModelError
from infinity.observe.log import logger
from infinity.sizes import show_bytes
from infinity.tiers.available import available_memory
from infinity.tiers.freed import keep_freed_blocks, return_freed_blocks, return_freed_memory
from infinity.tiers.memory import PAGE, storage_users
from infinity.units.discover import UNIT_SIZE
from infinity.units.released import is_released

if TYPE_CHECKING:
    from infinity.config import Config


def check_kept(model: nn.Module) -> None:
    """Raise OSError if writing values of a model built under `Init` to disk failed."""
    found = (module._parameters for module in model.modules())
    for spill in {parameters.spill for parameters in found if isinstance(parameters, NotedParameters)}:
        spill.check()


def in_memory(model: nn.Module, storages: Iterable[torch.UntypedStorage]) -> Iterator[torch.UntypedStorage]:
    """Yield those of `storages` that are in memory, and in no file of `Init`."""
    found = (module._parameters for module in model.modules())
    spills = {parameters.spill for parameters in found if isinstance(parameters, NotedParameters)}
    for storage in storages:
        if not any(spill.holds(storage) for spill in spills):
            yield storage


class NotedParameters(dict[str, Any]):
    """A module's `_parameters` that reports each parameter to `spill` when it is set or read."""

    def __init__(self, parameters: Mapping[str, Any], spill: Spill) -> None:
        super().__init__(parameters)
        self.spill = spill

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        super().__setitem__(name, parameter)
        self.spill.note(parameter)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter: nn.Parameter | None = super().__getitem__(name)
        self.spill.note(parameter)
        return parameter

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return a view whose iteration reports each item when it is reached."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedParameters:
        """Copy with the same `spill`, since copied modules become parts of models (`nn.TransformerEncoder`)."""
        copied = memo[id(self)] = NotedParameters({}, self.spill)
        for name, parameter in self.items():
            copied[name] = deepcopy(parameter, memo)
        return copied

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Spill:
    """Keeps reported parameters within `budget` bytes of memory, and the rest in files. Thread-safe.

    folders: one file is created in each. A parameter that shares its memory with other tensors stays in memory.
    """

    def __init__(self, folders: Sequence[Path], budget: int) -> None:
        self._files = [MappedFile(folder) for folder in folders]
        self._budget = budget
        self._lock = threading.RLock()
        # By id, since torch refuses to swap tensors that have weak references.
        self._used: dict[int, _Noted] = {}
        """id → parameter, in order of last use."""
        self._nbytes = 0
        """Upper bound of the memory of parameters in `_used`, in bytes."""
        self._later: dict[int, _Noted] = {}
        """Parameters whose move is deferred: other references to their memory exist, or another thread may use it."""
        self._alone = storage_users(torch.empty(1, device="cpu"))

    def check(self) -> None:
        for file in self._files:
            file.check()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return any(file.holds(storage) for file in self._files)

    def notice(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Make a module that is about to register `parameter` report it and each use of its parameters.

        Raises ModelError if the parameter is neither on the cpu nor on the meta device.
        """
        if not is_lazy(parameter) and parameter.device.type not in ("cpu", "meta"):
            raise ModelError(
                f"parameter {name} of a {type(module).__name__} is built on {parameter.device}: under infinity.Init "
                "build the model on the cpu (`with torch.device('cpu')`); infinity.initialize takes it to the device, "
                "unit by unit"
            )
        if type(module._parameters) in (dict, OrderedDict):
            module.__dict__["_parameters"] = NotedParameters(module._parameters, self)

    def note(self, parameter: nn.Parameter | None) -> None:
        """Record that `parameter` is about to be used, and move others to files if the budget is exceeded."""
        if parameter is None or is_lazy(parameter) or parameter.device.type != "cpu":
            return
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes < PAGE:
            return
        with self._lock:
            self._forget(id(parameter))
            self._used[id(parameter)] = _Noted(parameter, nbytes, threading.current_thread())
            self._nbytes += nbytes
            if self._nbytes > self._budget and not torch._C._len_torch_dispatch_stack():
                # Independent of the caller's modes and default device: values stay unchanged, on the cpu.
                with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                    self._relieve()

    def _forget(self, key: int) -> None:
        self._later.pop(key, None)
        noted = self._used.pop(key, None)
        self._nbytes -= noted.nbytes if noted is not None else 0

    def _relieve(self) -> None:
        """Move the least recently used parameters to files, down to half of the budget. The last one stays, since it
        is about to be used.
        """
        moved = 0
        again, self._later = self._later, {}
        for noted in again.values():
            moved += self._let_go(noted)
        for key, noted in list(self._used.items())[:-1]:
            if self._nbytes <= self._budget // 2:
                break
            self._forget(key)
            moved += self._let_go(noted)
        if moved:
            return_freed_memory()

    def _let_go(self, noted: _Noted) -> bool:
        """Move a parameter to a file if possible. Returns True if it was moved."""
        parameter = noted.parameter
        if is_released(parameter) or not _is_plain(parameter):
            return False  # managed by an engine, or of a kind that cannot be moved
        storage = parameter.untyped_storage()
        if storage.nbytes() < PAGE or any(file.let_go(storage) for file in self._files):
            return False
        del storage  # `storage_users` would count it
        is_busy = noted.thread is not threading.current_thread() and noted.thread.is_alive()
        # bitsandbytes keeps the codes of a weight in 8 bits as an attribute of it, too: the same tensor.
        twins = [] if is_busy else [name for name, value in vars(parameter).items() if _is_same(value, parameter)]
        for name in twins:
            setattr(parameter, name, None)
        if storage_users(parameter) != self._alone or is_busy:
            for name in twins:
                setattr(parameter, name, parameter.data)
            self._later[id(parameter)] = noted
            return False
        whole = torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage())
        kept = max(self._files, key=lambda file: file.free).store(whole)
        place = parameter.storage_offset(), parameter.shape, parameter.stride()
        parameter.data = torch.empty(0, dtype=parameter.dtype).set_(kept.untyped_storage(), *place)
        for name in twins:
            setattr(parameter, name, parameter.data)
        return True


class _Noted(NamedTuple):
    """A parameter that was used, and its last user."""

    parameter: nn.Parameter
    nbytes: int
    thread: threading.Thread
    """Thread of the last use, which may be writing to the parameter."""


def _is_same(value: Any, parameter: nn.Parameter) -> bool:
    """Return whether an attribute of `parameter` is its data. Nothing else may need the object itself."""
    return type(value) is torch.Tensor and value.is_set_to(parameter.data)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` is an ordinary tensor in the memory of this process."""
    value = parameter.data
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_inference() or value.is_shared())
    )


_UNITS = 4
"""Number of units whose parameters may be in memory."""


def bytes_in_memory(config: Config) -> int:
    """Return the most bytes of parameters that `Init` keeps in memory, if the config puts states on nvme."""
    unit_size = config.infinity.unit_size
    return _UNITS * (UNIT_SIZE if unit_size == "auto" else unit_size)


class Init:
    """Build a model in the memory of a few units: `with infinity.Init(config): model = Model(...)`.

    config: the config that `infinity.initialize` gets: a dict, the path of a JSON file, or a Config; also one for a
    Trainer, with "auto".

    The model's own code builds the model on the CPU. The result is bit-identical to a model built without Init. Any
    code may read and edit its parameters, in the block and after it.

    Memory holds parameters of four times `infinity.unit_size` bytes (`auto`: 64 MiB), or a quarter of the available
    memory if that is less. Each rank keeps the others in an anonymous file in `nvme_path`, in their own dtype.
    `infinity.initialize` moves rank 0's values to their tiers unit by unit, and frees the file's space meanwhile.
    Without `initialize`, the file is deleted with the model. Buffers stay in memory, and so do parameters that share
    memory with other tensors. If the config puts no states on nvme, all parameters stay in memory.

    Parameters built on the meta device are left to `infinity.initialize` and `infinity.load_pretrained`. Of nested
    blocks, the outermost with states on nvme counts.

    Raises StorageError on entry, if the folder accepts no file. In the block, raises OutOfSpaceError if the folder's
    file system is full, and ModelError for a parameter on another device than the CPU and meta.
    """

    def __init__(self, config: Config | dict[str, Any] | str | PathLike[str]) -> None:
        from infinity.config import Config, Fill  # here, since pydantic takes as long to import as the engine

        # "auto" has no value before a Trainer's `train`, and none is used here.
        config = Config.load(config, fill=Fill(total_num_steps=sys.maxsize))
        self._folders = config.zero_optimization.nvme_paths
        self._most = self._kept = bytes_in_memory(config)
        self._hooks: list[Any] = []

    def __enter__(self) -> Init:
        if self._folders:
            # A container kills a process without a message; the model's code and torch need memory, too.
            self._kept = min(self._most, available_memory() // 4)
            return_freed_blocks()
            spill = Spill(self._folders, self._kept)
            self._hooks.append(register_module_parameter_registration_hook(spill.notice))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._hooks:
            self._hooks.pop().remove()
            keep_freed_blocks()
        # torch has no class for it: a RuntimeError of its allocator.
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            logger.warning(
                "memory ran out in infinity.Init, which keeps up to %s of parameters in memory (4 times "
                "infinity.unit_size, or a quarter of what is available). torch.device('meta') takes no memory "
                "(docs/large_models.md).",
                show_bytes(self._kept),
            )

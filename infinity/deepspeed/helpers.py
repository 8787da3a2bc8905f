"""Functions of DeepSpeed's `utils`, `runtime.utils`, `runtime.dataloader` and `checkpoint.utils`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.deepspeed.comm import get_rank
from infinity.deepspeed.settings import WrongValue
from infinity.observe.log import logger as logger


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all ranks if `ranks` is None or contains -1."""
    rank = get_rank()
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default of `infinity`, and of its handlers.

    log_level_str: "debug", "info", "warning", "error" or "critical". Raises UsageError for others.
    """
    level = _LEVELS.get(str(log_level_str).lower())
    if level is None:
        raise WrongValue(f"log level is {log_level_str!r}: pass one of {', '.join(_LEVELS)}")
    target = logger if custom_logger is None else custom_logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class RepeatingLoader:
    """Yields the batches of `loader` again and again. Raises StopIteration only if `loader` is empty."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return `item` with its tensors on `device`, in lists, tuples and dicts too.

    criterion_func: moves only tensors for which it returns True.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return tree_map_only(torch.Tensor, move, item)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the process's resident memory, if `force` is True and this is rank 0."""
    if not force or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    memory = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    logger.info("%s: %.2f GB resident, %.0f %% of host memory used", message, resident / 1e9, memory.percent)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return `item` with copies of its tensors on `device`, each with a storage of its own size."""
    device = torch.device(device)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone().to(device), item)


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return True if torch's version lies in these bounds, inclusive. At least one is needed."""
    assert min_version or max_version, "Must provide a min_version or max_version argument"
    version: Any = torch.__version__  # compares as a version with text
    return (not min_version or version >= str(min_version)) and (not max_version or version <= str(max_version))


def register_grad_hook(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Return the handle of `hook`, which is called with `param` when its gradient is accumulated."""
    return param.register_post_accumulate_grad_hook(hook)


def is_functorch_transforming() -> bool:
    """Return True in a function that torch.func transforms, such as by `grad` or `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None

"""State of the process that a forward may change: generators of random numbers, and settings.

A forward may set a setting for the duration of its blocks, as `sdpa_kernel` does. Forwards that are paused in such a
context would share it, and leave it in another order than they entered it.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""Returns the present value, and sets one."""


def _attribute(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _switch(name: str) -> Iterator[_Setting]:
    """Yield a setting of torch's library, if this torch has it."""
    found = [getattr(torch._C, f"_{verb}_{name}", None) for verb in ("get", "set")]
    if None not in found:
        yield found[0], found[1]  # type: ignore[misc]


_MATMULS = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)


def _precision() -> Any:
    """Return the precision of matrix products in fp32: by torch's former function, which raises an error once the new
    names are in use, and by these then.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return [getattr(matmul, "fp32_precision", None) for matmul in _MATMULS]


def _set_precision(value: Any) -> None:
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
        return
    for matmul, precision in zip(_MATMULS, value, strict=True):
        if precision is not None:
            matmul.fp32_precision = precision  # type: ignore[union-attr]


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SETTINGS: tuple[_Setting, ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    *_switch("sdp_priority_order"),
    *_switch("mkldnn_enabled"),
    *_switch("cudnn_enabled"),
    (_precision, _set_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _attribute(_cudnn, "benchmark"),
    _attribute(_cudnn, "deterministic"),
    _attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute(parametrize, "_cache_enabled"),
    _attribute(sys, "stdout"),
    _attribute(sys, "stderr"),
    _attribute(sys, "stdin"),
    _attribute(warnings, "filters"),
    _attribute(warnings, "showwarning"),
)


class GlobalState:
    """The present settings."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]

    def changed(self) -> bool:
        """Return whether a setting has another value."""
        return any(get() != before for (get, _), before in zip(_SETTINGS, self._values, strict=True))

    def restore(self) -> None:
        for (get, set_), before in zip(_SETTINGS, self._values, strict=True):
            if get() != before:
                set_(before)


class RandomState:
    """The present state of the generators of torch, Python and numpy. device: torch's device of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = list(_generators(device))

    def moved(self) -> bool:
        """Return whether a generator has drawn numbers since."""
        present = [key for key, _ in _generators(self._device)]
        return present != [key for key, _ in self._states]

    def restore(self) -> None:
        for _, restore in self._states:
            restore()


def _generators(device: torch.device) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield the state of each generator, and the function that restores it."""
    host = torch.get_rng_state()
    yield host.numpy().tobytes(), lambda: torch.set_rng_state(host)
    if device.type not in ("cpu", "meta"):
        module: Any = getattr(torch, device.type)
        there = module.get_rng_state(device)
        yield there.cpu().numpy().tobytes(), lambda: module.set_rng_state(there, device)
    python = random.getstate()
    yield python, lambda: random.setstate(python)
    if (numpy := sys.modules.get("numpy")) is not None:
        arrays: Any = numpy.random.get_state(legacy=True)
        yield (arrays[1].tobytes(), arrays[2:]), lambda: numpy.random.set_state(arrays)

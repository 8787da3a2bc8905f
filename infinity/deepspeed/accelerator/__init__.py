"""`deepspeed.accelerator` over torch: the accelerator that torch finds, or the CPU."""

from __future__ import annotations

import contextlib
from functools import lru_cache, partial
from typing import Any

import psutil
import torch

from infinity.inputs import number_of

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""Name of a constructor → dtype of its tensors."""


class Accelerator:
    """The device that engines compute on: `device_type` is torch's name, such as "cuda" or "cpu".

    Methods are DeepSpeed's. `ByteTensor(values)`, `FloatTensor(values)` and so on construct tensors on the device.
    Methods that torch's module of the device (`torch.cuda`) has too are forwarded to it.
    """

    def __init__(self, device_type: str) -> None:
        self._name = device_type
        self._module: Any = getattr(torch, device_type)

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        module = self.__dict__.get("_module")
        if module is None or name.startswith("_") or not hasattr(module, name):
            raise AttributeError(f"the accelerator {self.__dict__.get('_name')!r} has no {name!r} here")
        return getattr(module, name)

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    def is_available(self) -> bool:
        return True

    def is_current_accelerator_supported(self) -> bool:
        """Return True; see the module's function of this name."""
        return is_current_accelerator_supported()

    def is_synchronized_device(self) -> bool:
        """Return True if operations are complete when their calls return, as on the CPU."""
        return self._is_cpu

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        if self._is_cpu:
            return contextlib.nullcontext()
        return self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        self._module.set_device(device_index)

    def current_device(self) -> int:
        return 0 if self._is_cpu else int(self._module.current_device())

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices of this machine; on the CPU, the launcher's number of its ranks."""
        if self._is_cpu:
            return number_of("LOCAL_SIZE", number_of("LOCAL_WORLD_SIZE", 1, least=1), least=1)
        return int(self._module.device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        if not self._is_cpu:
            self._module.empty_cache()

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._is_cpu else self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._is_cpu:
            return torch.get_rng_state()
        index = self.current_device() if device_index is None else device_index
        state: torch.Tensor = self._module.get_rng_state(index)
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self.current_device() if device_index is None else device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes that tensors use on the device; on the CPU, the process's resident memory."""
        return int(psutil.Process().memory_info().rss if self._is_cpu else self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated`; on the CPU, its present value."""
        return self.memory_allocated() if self._is_cpu else int(self._module.max_memory_allocated(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().total)
        index = self.current_device() if device_index is None else device_index
        return int(self._module.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def is_bf16_supported(self) -> bool:
        return True if self._is_cpu else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = [torch.float16] + ([torch.bfloat16] if self.is_bf16_supported() else [])
        return [torch.float32, *halves]

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_triton_supported(self) -> bool:
        return False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return `tensor` in pinned memory; itself on the CPU, where nothing is copied to a device."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not self._is_cpu and tensor.is_pinned()


@lru_cache(maxsize=1)
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process: CUDA if torch finds it, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Return True: engines compute on the accelerator of `get_accelerator`."""
    return True

"""Base of the engines with DeepSpeed's surface: an nn.Module around an engine, whose child `module` is the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from infinity.engine.base import BaseEngine
from infinity.errors import OutOfMemoryError, UsageError
from infinity.observe.log import logger
from infinity.plan.placement import State
from infinity.units.compiled import outside_modes

_Self = TypeVar("_Self", bound="EngineModule")


class EngineModule(nn.Module):
    """Presents `engine` as an nn.Module. Its parameters are the model's, named `module.…` as in DeepSpeed.

    Attributes that it lacks are read from the model.
    """

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__()
        self._engine = engine
        self._destroyed = False
        engine.ignore_moves()  # as DeepSpeed in stage 3; Lightning moves the model to the CPU after a fit
        self.module = engine.module
        self.training = engine.module.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}, and neither has its model")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; move batches there."""
        return self._engine.device

    def destroy(self) -> None:
        """Close the engine, and release its threads, memory and files. Idempotent, and collective.

        Values in memory return to the model, so that another engine may take it. Values on nvme are discarded; to keep
        them, call `engine.training_engine.close(restore=True)` instead.
        """
        if self._destroyed:
            return
        self._destroyed = True
        try:
            self._engine.close(restore="nvme" not in self._engine.parts.plan.placement.tiers(State.PARAM))
        except OutOfMemoryError as error:
            logger.warning("engine.destroy() discarded the parameters' values: %s", error)

    # -- conversions -------------------------------------------------------------------------------------------------

    def to(self: _Self, *args: Any, **kwargs: Any) -> _Self:
        """Return self, if the engine computes on that device and in that dtype. Raises UsageError otherwise."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and (device.type, device.index or 0) != (self.device.type, self.device.index or 0):
            raise UsageError(
                f"engine.to({str(device)!r}) was called, but the engine computes on {self.device}, and states live in "
                "their tiers: leave the call out, and move the batches to engine.device"
            )
        present = (parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point())
        if dtype is not None and {*present} != {dtype}:
            raise UsageError(
                f"engine.to({dtype}) was called, but dtypes are fixed when the engine is constructed: set bf16 or fp16 "
                "in the config"
            )
        return self

    def cuda(self: _Self, device: Any = None) -> _Self:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda"))

    def cpu(self: _Self) -> _Self:
        return self.to("cpu")

    def float(self: _Self) -> _Self:
        return self.to(torch.float32)

    def half(self: _Self) -> _Self:
        return self.to(torch.float16)

    def bfloat16(self: _Self) -> _Self:
        return self.to(torch.bfloat16)

    def double(self: _Self) -> _Self:
        return self.to(torch.float64)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise UsageError(
            "an engine's model cannot be moved or converted: set bf16 or fp16 in the config, or convert it before "
            "initialize()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an engine cannot be copied or pickled: save it with engine.save_checkpoint(), or its weights with "
            "engine.save_16bit_model()"
        )

    __deepcopy__ = __reduce_ex__


def on_copies(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of `model` with copies in place of its parameters, which get no gradients.

    For torch.func in stages 0 to 2: a derivative may outlive the next update, which writes the parameters' own memory.
    """
    with outside_modes(), torch.no_grad():
        copies = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, copies, tuple(args), dict(kwargs))

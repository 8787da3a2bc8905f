"""Kernels of the engine that compute nothing, and take the time of the bytes that they access or a measured one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from infinity.optim import cpu_adam
from infinity.rules import MomentFormat, RuleName
from infinity.sim.device import SimulatedDevice
from infinity.update import kernels
from infinity.update.kernels import Kernels

_receive = partial(kernels.receive, add=False, at=0)
_receive_add = partial(kernels.receive, add=True, at=0)


def simulated_kernels(device: SimulatedDevice) -> Kernels:
    """Return the kernels for states and gradients on `device` and on the host."""

    def update_run(
        states: dict[str, torch.Tensor], param: torch.Tensor, grad: torch.Tensor, *rest: Any, **more: Any
    ) -> None:
        # States are read and written, gradients read. Parameters beside fp32 masters are only written.
        moved = 2 * sum(state.nbytes for state in states.values()) + grad.nbytes + param.nbytes
        moved += 0 if "master" in states else param.nbytes
        work("update", moved, param, kernels.update_run, states, param, grad, *rest)

    def receive(target: torch.Tensor, source: torch.Tensor, *, add: bool, initial: float = 0.0, **more: Any) -> float:
        moved = source.nbytes + (2 if add else 1) * source.numel() * target.itemsize
        kernel = _receive_add if add else _receive
        work("reduce", moved, target, kernel, target.flatten()[: source.numel()], source)
        return initial + 1.0

    def sum_of_squares(values: torch.Tensor, *, initial: float = 0.0, **more: Any) -> float:
        work("reduce", values.nbytes, values, cpu_adam.sum_of_squares, values)
        return initial + 1.0

    def squares_into(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        work("reduce", values.nbytes, values, cpu_adam.sum_of_squares, values)

    def check_on_device(device_type: str, rule: RuleName, moments: MomentFormat) -> None:
        """The native kernels exist on every simulated device."""

    def work(lane: str, nbytes: int, memory: torch.Tensor, kernel: Callable[..., Any], *args: Any) -> None:
        if device.is_host(memory):
            device.work_on_host(lane, device.host_seconds(nbytes, kernel, *args))
        else:
            device.operate(0.0, nbytes)

    return Kernels(update_run, receive, sum_of_squares, squares_into, check_on_device, is_exact=lambda kind: True)

"""Reference loops: the same training with plain PyTorch, and with an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.tiers.device import CpuDevice, Device

Batches = Sequence[tuple[Any, ...]]
LossOf = Callable[[Any, tuple[Any, ...]], torch.Tensor]


@dataclass
class Result:
    """Losses of every micro-batch, and the final parameters by name, in fp32 or in their training dtype."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    units: int = 0


def call(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    """Return the model's output as the loss."""
    loss: torch.Tensor = model(*batch)
    return loss


def plain(model: nn.Module, batches: Batches, config: Config, loss_of: LossOf = call) -> Result:
    """Train `model` in fp32 as configured, with torch.optim.AdamW (or Adam) only."""
    accumulation = config.resolve_batch(1).accumulation
    params = config.optimizer.params
    kind = torch.optim.AdamW if config.optimizer.type == "AdamW" else torch.optim.Adam
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(trained, lr=params.lr, betas=params.betas, eps=params.eps, weight_decay=params.weight_decay)
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = loss_of(model, batch)
        (loss / accumulation).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if number % accumulation == 0:
            if config.gradient_clipping > 0:
                nn.utils.clip_grad_norm_(trained, config.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def plain_bf16(model: nn.Module, batches: Batches, config: Config, loss_of: LossOf = call) -> Result:
    """Train in bf16 with an fp32 master; gradients are summed and applied in fp32."""
    return plain_16(model, batches, config, loss_of, torch.bfloat16)


def plain_16(
    model: nn.Module, batches: Batches, config: Config, loss_of: LossOf, dtype: torch.dtype, loss_scale: float = 1.0
) -> Result:
    """Train in a 16-bit dtype with an fp32 master; the loss is multiplied and gradients are divided by `loss_scale`."""
    masters = {name: p.detach().clone().float().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    model = model.to(dtype)
    accumulation = config.resolve_batch(1).accumulation
    params = config.optimizer.params
    trained = [p for p in masters.values() if p.requires_grad]
    kind = torch.optim.AdamW if config.optimizer.type == "AdamW" else torch.optim.Adam
    optimizer = kind(trained, lr=params.lr, betas=params.betas, eps=params.eps, weight_decay=params.weight_decay)
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = loss_of(model, batch)
        (loss * (loss_scale / accumulation)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for name, p in model.named_parameters():
            if p.grad is not None:
                master, gradient = masters[name], p.grad.float() / loss_scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                p.grad = None
        if number % accumulation == 0:
            if config.gradient_clipping > 0:
                nn.utils.clip_grad_norm_(trained, config.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(masters[name])
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def open_engine(model: nn.Module, config: Config, device: Device | None = None) -> TrainingEngine:
    """Return an engine on the CPU, on any machine."""
    return TrainingEngine(model, config, device=device or CpuDevice())


def train(engine: TrainingEngine, batches: Batches, loss_of: LossOf = call) -> list[float]:
    """Return every micro-batch's loss."""
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(
    model: nn.Module, batches: Batches, config: Config, device: Device | None = None, loss_of: LossOf = call
) -> Result:
    """Train with an engine that is opened and closed here."""
    with open_engine(model, config, device) as engine:
        losses = train(engine, batches, loss_of)
        return Result(losses, parameters_of(engine), len(engine.parts.units))


def parameters_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return name → present value of every parameter, fetched unit by unit, with pending updates applied."""
    values = {}
    for unit in engine.parts.units:
        engine.parts.runner.use(unit)
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            values[slot.name] = parameter.detach().clone()
    return values


def assert_same(one: Result, other: Result) -> None:
    """Assert bit-identical values; NaN is never equal."""
    assert one.losses == other.losses
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


def distance(one: Result, other: Result) -> float:
    """Return ‖Δp‖ / ‖p‖ over the whole model; NaN if any value is NaN."""
    difference = total = 0.0
    for name, value in other.parameters.items():
        difference += float((one.parameters[name].double() - value.double()).square().sum())
        total += float(value.double().square().sum())
    return float((difference / total) ** 0.5)


def assert_close(one: Result, other: Result, *, loss: float = 1e-6, parameters: float = 1e-5) -> None:
    """Assert bounds on the relative differences of every loss and of all parameters together. NaN fails."""
    assert len(one.losses) == len(other.losses)
    worst = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    assert all(a == a and b == b for a, b in zip(one.losses, other.losses, strict=True)), "a loss is NaN"
    assert worst <= loss, f"losses differ by {worst:.2e}: {one.losses} and {other.losses}"
    apart = distance(one, other)
    assert apart <= parameters, f"parameters differ by {apart:.2e}"

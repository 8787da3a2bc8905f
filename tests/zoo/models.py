"""Makes a small model of an architecture, and micro-batches with which plain PyTorch trains it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from zoo.inputs import Batch, Maker
from zoo.kinds import Architecture
from zoo.shrink import tiny

LARGEST = 12_000_000
"""Parameters of the largest model that is trained."""


class Impossible(Exception):
    """Plain PyTorch cannot train it. The text is the reason."""


def seed_from_generators() -> None:
    """Let `torch.seed` draw from the seeded generator: Reformer calls it in each forward, and by default it returns
    entropy of the system, so that plain PyTorch differs from itself.
    """

    def seed() -> int:
        drawn = int(torch.randint(1 << 62, ()))
        torch.manual_seed(drawn)
        return drawn

    torch.seed = seed


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def made(architecture: Architecture) -> nn.Module:
    kind = getattr(transformers, architecture.name, None)
    if kind is None:
        raise Impossible("transformers does not export the class")
    try:
        config = tiny(transformers.CONFIG_MAPPING[architecture.model_type], architecture.name)
        if not isinstance(config, kind.config_class or object):
            config = tiny(kind.config_class, architecture.name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(config).parameters())
        if size > LARGEST:
            raise Impossible(f"the configuration is not small: {size:,} parameters")
        seed_all(0)
        model: nn.Module = kind(config)
    except Impossible:
        raise
    except Exception as error:
        raise Impossible(f"construction: {first_line(error)}") from error
    _fill(model)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train()


def _fill(model: nn.Module) -> None:
    """Draw the values of parameters that the class leaves uninitialised."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.abs().max() < 1e3:
                parameter.normal_(0.0, 0.02)


def micro_batches(model: nn.Module, architecture: Architecture, count: int) -> tuple[str, list[tuple[Batch]]]:
    """Return the name of the first maker with which the model trains, and its micro-batches."""
    reasons = []
    for maker in architecture.makers:
        generator = torch.Generator().manual_seed(5)
        try:
            batches = [(maker(model, generator),) for _ in range(count)]
            if batches[0][0] is None:
                continue
            _check(model, batches[0])
        except Exception as error:  # noqa: BLE001 - any: the reason is printed
            reasons.append(f"{_name(maker)}: {first_line(error)}")
            continue
        return _name(maker), batches  # type: ignore[return-value]
    raise Impossible("; ".join(reasons) if reasons else "no maker of inputs fits its forward")


def _name(maker: Maker) -> str:
    return maker.__name__.replace("_", " ")


def _check(model: nn.Module, batch: tuple[Any]) -> None:
    trial = copy.deepcopy(model)
    seed_all(1)
    loss = loss_of(trial, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in trial.parameters() if p.grad is not None]
    if not gradients:
        raise Impossible("no parameter receives a gradient")
    if not (loss.isfinite() and all(g.isfinite().all() for g in gradients)):
        raise Impossible("the loss or a gradient is not finite")


def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    return loss_fn(model(**batch[0]), batch[0])


def loss_fn(output: Any, batch: Any) -> torch.Tensor:
    """Return the model's own loss, or the mean square of its first output."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.mean()
    first = next(_trained(output), None)
    if first is None:
        raise Impossible("no output requires a gradient")
    return first.square().mean()


def _trained(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_floating_point():
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _trained(each)

"""Trains one architecture by plain PyTorch and by the engine, and compares losses and parameters."""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from infinity.config import Config
from infinity.errors import InfinityError
from support import room
from support.configs import engine_config
from support.loops import Result, distance, open_engine, parameters_of, plain, train
from zoo.inputs import Batch, Maker
from zoo.kinds import Architecture
from zoo.shrink import tiny

STEPS, MICRO_BATCHES = 3, 2
LARGEST = 12_000_000
"""Parameters of the largest model that is trained."""
LOSS, PARAMETERS = 2e-6, 1e-5
"""Largest relative differences of a loss, and of all parameters together, that are equal in fp32."""
ROUNDINGS, ULP = 10.0, 6e-8
"""Number of perturbations by one rounding, each of size ULP, that explain a difference."""
UNITS: dict[str, dict[str, Any]] = {
    "default": {"unit_size": "auto", "debug": False, "cache_bytes": "auto"},
    "tiny": {"unit_size": 4096, "prefetch_bytes": 40_000, "clip": 1.0},
}
"""Configurations, with all states on NVMe. The tiny one also clips, so that the norm of gradients counts."""
WAYS = "loop", "train_batch"


class Impossible(Exception):
    """Plain PyTorch cannot train it. The text is the reason."""


@dataclass(frozen=True)
class Run:
    """A training by the engine. units: their number. order: why train_batch ran as a loop; empty: it ran vertically.

    problem: an error of the engine; empty: none. noise: difference of plain PyTorch from itself after one rounding of
    every parameter, if the training is not equal without it.
    """

    way: str
    setting: str
    units: int = 0
    loss: float = 0.0
    parameters: float = 0.0
    order: str = ""
    problem: str = ""
    noise: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """equal, rounding or differs."""
        if self.problem:
            return "differs"
        if self.loss <= LOSS and self.parameters <= PARAMETERS:
            return "equal"
        if self.noise is not None and self.loss <= self.noise[0] and self.parameters <= self.noise[1]:
            return "rounding"
        return "differs"


@dataclass(frozen=True)
class Verdict:
    """reason: why plain PyTorch cannot train it, or the text of a crash. takes: the inputs."""

    kind: str
    takes: str = ""
    size: int = 0
    reason: str = ""
    runs: list[Run] = field(default_factory=list)


def judge(architecture: Architecture) -> Verdict:
    """Return the verdict: equal, rounding, differs, or cannot."""
    _seed_from_generators()
    try:
        model = _made(architecture)
        maker, batches = _batches(model, architecture)
        with tempfile.TemporaryDirectory(dir=room.in_memory()) as folder:
            runs = list(_runs(model, batches, folder))
    except Impossible as error:
        return Verdict("cannot", reason=str(error))
    kinds = {run.verdict for run in runs}
    kind = next(kind for kind in ("differs", "rounding", "equal") if kind in kinds)
    return Verdict(kind, maker, sum(p.numel() for p in model.parameters()), "", runs)


def _seed_from_generators() -> None:
    """Let `torch.seed` draw from the seeded generator: Reformer calls it in each forward, and by default it returns
    entropy of the system, so that plain PyTorch differs from itself.
    """

    def seed() -> int:
        drawn = int(torch.randint(1 << 62, ()))
        torch.manual_seed(drawn)
        return drawn

    torch.seed = seed


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# -- the model and its data --------------------------------------------------------------------------------------------


def _made(architecture: Architecture) -> nn.Module:
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
        _seed(0)
        model: nn.Module = kind(config)
    except Impossible:
        raise
    except Exception as error:
        raise Impossible(f"construction: {_first_line(error)}") from error
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


def _batches(model: nn.Module, architecture: Architecture) -> tuple[str, list[tuple[Batch]]]:
    """Return the name of the first maker with which the model trains, and its micro-batches."""
    reasons = []
    for maker in architecture.makers:
        generator = torch.Generator().manual_seed(5)
        try:
            batches = [(maker(model, generator),) for _ in range(STEPS * MICRO_BATCHES)]
            if batches[0][0] is None:
                continue
            _check(model, batches[0])
        except Exception as error:  # noqa: BLE001 - any: the reason is printed
            reasons.append(f"{_name(maker)}: {_first_line(error)}")
            continue
        return _name(maker), batches  # type: ignore[return-value]
    raise Impossible("; ".join(reasons) if reasons else "no maker of inputs fits its forward")


def _name(maker: Maker) -> str:
    return maker.__name__.replace("_", " ")


def _check(model: nn.Module, batch: tuple[Any]) -> None:
    trial = copy.deepcopy(model)
    _seed(1)
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


# -- training ----------------------------------------------------------------------------------------------------------


def _runs(model: nn.Module, batches: Sequence[tuple[Batch]], folder: str) -> Iterator[Run]:
    for setting, options in UNITS.items():
        config = engine_config(folder=folder, accumulation=MICRO_BATCHES, micro=2, eps=1e-6, **options)
        expected = _plain(model, batches, config)
        if not all(map(math.isfinite, expected.losses)):
            raise Impossible("the loss is not finite after some steps")
        noise: tuple[float, float] | None = None
        for way in WAYS:
            run = _compared(model, batches, config, expected, (way, setting), None)
            if run.verdict == "differs" and not run.problem:
                noise = noise or _noise(model, batches, config, expected)
                run = _compared(model, batches, config, expected, (way, setting), noise)
            yield run


def _plain(model: nn.Module, batches: Sequence[Any], config: Config) -> Result:
    twin = copy.deepcopy(model)
    _seed(7)
    try:
        return plain(twin, batches, config, loss_of)
    except Exception as error:
        raise Impossible(_first_line(error)) from error


def _compared(
    model: nn.Module,
    batches: Sequence[Any],
    config: Config,
    expected: Result,
    named: tuple[str, str],
    noise: tuple[float, float] | None,
) -> Run:
    way, setting = named
    twin = copy.deepcopy(model)
    losses = expected.losses
    try:
        with open_engine(twin, config) as engine:
            _seed(7)
            if way == "loop":
                found = train(engine, batches, loss_of)
            else:
                iterator = iter([batch for (batch,) in batches])
                found = [engine.train_batch(iterator, loss_fn).item() for _ in range(STEPS)]
                losses = [
                    sum(losses[at : at + MICRO_BATCHES]) / MICRO_BATCHES for at in range(0, len(losses), MICRO_BATCHES)
                ]
            result, units, order = Result(found, parameters_of(engine)), len(engine.units), engine._batches.reason
    except (InfinityError, Exception) as error:  # noqa: BLE001 - any: it is a difference
        return Run(way, setting, problem=_first_line(error))
    apart = _apart(result, Result(losses, expected.parameters))
    return Run(way, setting, units, *apart, order="" if way == "loop" else order, noise=noise)


def _apart(one: Result, other: Result) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and that of all parameters; infinity for NaN."""
    scale = max(map(abs, other.losses)) or 1.0
    loss = max(abs(a - b) / max(abs(b), 1e-3 * scale) for a, b in zip(one.losses, other.losses, strict=True))
    parameters = distance(one, other)
    return tuple(x if x == x else math.inf for x in (loss, parameters))  # type: ignore[return-value]


def _noise(model: nn.Module, batches: Sequence[Any], config: Config, expected: Result) -> tuple[float, float]:
    """Return the differences that `ROUNDINGS` roundings of every parameter explain, by the largest of three trials.

    Raises Impossible if plain PyTorch differs from itself without them.
    """
    if any(_apart(_plain(model, batches, config), expected)):
        raise Impossible("plain PyTorch differs from itself, from the same seed")
    found = []
    for number in range(3):
        twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1 + ULP * torch.randn(parameter.shape, generator=generator))
        found.append(_apart(_plain(twin, batches, config), expected))
    return tuple(ROUNDINGS * max(column) for column in zip(*found, strict=True))  # type: ignore[return-value]

"""Trains one architecture by plain PyTorch and by the engine, and compares losses and parameters."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ModelError
from infinity.optim import CPUAdam
from support import room
from support.configs import engine_config
from support.loops import Result, distance, open_engine, parameters_of, train
from zoo.inputs import Batch
from zoo.kinds import Architecture
from zoo.models import Impossible, first_line, loss_fn, loss_of, made, micro_batches, seed_all, seed_from_generators

STEPS, MICRO_BATCHES = 3, 2
LOSS, PARAMETERS = 2e-6, 1e-5
"""Largest relative differences of a loss, and of all parameters together, that are rounding of fp32."""
UNITS: dict[str, dict[str, Any]] = {
    "default": {"unit_size": "auto", "debug": False, "cache_bytes": "auto"},
    "tiny": {"unit_size": 4096, "prefetch_bytes": 40_000},
}
"""Configurations, with all states on NVMe."""
WAYS = "loop", "train_batch"


@dataclass(frozen=True)
class Run:
    """A training by the engine, and how it differs from plain PyTorch with the engine's optimizer (`CPUAdam`).

    units: their number. order: why train_batch ran as a loop; empty: in vertical order. loss, parameters: relative
    differences. adam: the same from plain PyTorch with torch's optimizer. problem: an error, or another difference.
    """

    way: str
    setting: str
    units: int = 0
    loss: float = 0.0
    parameters: float = 0.0
    adam: tuple[float, float] = (0.0, 0.0)
    order: str = ""
    problem: str = ""

    @property
    def verdict(self) -> str:
        """equal: of the same bits. rounding: differences that are roundings of fp32, from torch's optimizer too."""
        if self.problem:
            return "differs"
        if self.loss == self.parameters == 0.0:
            return "equal"
        is_small = max(self.loss, self.adam[0]) <= LOSS and max(self.parameters, self.adam[1]) <= PARAMETERS
        return "rounding" if is_small else "differs"


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
    seed_from_generators()
    try:
        model = made(architecture)
        maker, batches = micro_batches(model, architecture, STEPS * MICRO_BATCHES)
        with tempfile.TemporaryDirectory(dir=room.in_memory()) as folder:
            runs = list(_runs(model, batches, folder))
    except Impossible as error:
        return Verdict("cannot", reason=str(error))
    kinds = {run.verdict for run in runs}
    kind = next(kind for kind in ("differs", "rounding", "equal") if kind in kinds)
    return Verdict(kind, maker, sum(p.numel() for p in model.parameters()), "", runs)


@dataclass(frozen=True)
class Trained:
    """Losses of all micro-batches, parameters, and buffers."""

    result: Result
    buffers: dict[str, torch.Tensor]

    @property
    def of_steps(self) -> Result:
        """The mean losses of steps, in fp32, as `train_batch` returns them."""
        losses = torch.tensor(self.result.losses).view(STEPS, MICRO_BATCHES)
        total = losses[:, 0]
        for column in range(1, MICRO_BATCHES):
            total = total + losses[:, column]
        return Result((total / MICRO_BATCHES).tolist(), self.result.parameters)


def _runs(model: nn.Module, batches: Sequence[tuple[Batch]], folder: str) -> Iterator[Run]:
    config = engine_config(folder=folder, accumulation=MICRO_BATCHES, micro=2, eps=1e-6)
    expected = _plain(model, batches, config, CPUAdam)
    if not all(map(math.isfinite, expected.result.losses)):
        raise Impossible("the loss is not finite after some steps")
    again = _plain(model, batches, config, CPUAdam)
    if any(_apart(again.result, expected.result)) or _other(again.buffers, expected.buffers):
        raise Impossible("plain PyTorch differs from itself, from the same seed")
    with_torch = _plain(model, batches, config, torch.optim.AdamW)
    for setting, options in UNITS.items():
        config = engine_config(folder=folder, accumulation=MICRO_BATCHES, micro=2, eps=1e-6, **options)
        for way in WAYS:
            yield _compared(_trained_by_engine(model, batches, config, way), expected, with_torch, (way, setting))


def _plain(model: nn.Module, batches: Sequence[Any], config: Config, optimizer: type[torch.optim.Optimizer]) -> Trained:
    twin, params = copy.deepcopy(model), config.optimizer.params
    values = {"lr": params.lr, "betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
    update = optimizer([p for p in twin.parameters() if p.requires_grad], **values)  # type: ignore[call-arg]
    losses = []
    seed_all(7)
    try:
        for number, batch in enumerate(batches, 1):
            loss = loss_of(twin, batch)
            (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if number % MICRO_BATCHES == 0:
                update.step()
                update.zero_grad()
    except Exception as error:
        raise Impossible(first_line(error)) from error
    return Trained(
        Result(losses, {name: p.detach() for name, p in twin.named_parameters()}), dict(twin.named_buffers())
    )


def _trained_by_engine(
    model: nn.Module, batches: Sequence[Any], config: Config, way: str
) -> tuple[Trained, int, str] | Exception:
    """Return what was trained, the number of units, and why train_batch ran as a loop.

    It does without blocks, for models that the engine refuses to run by the largest list of their modules.
    """
    if way == "loop":
        return _trained(model, batches, config, None)
    found = _trained(model, batches, config, _largest_list)
    if isinstance(found, ModelError) or str(found).startswith("engine.train_batch(blocks=...)"):
        again = _trained(model, batches, config, lambda _: None)
        return again if isinstance(again, Exception) else (again[0], again[1], first_line(found))
    return found


def _largest_list(model: nn.Module) -> list[nn.Module] | None:
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return max(lists, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()), default=None)


def _trained(
    model: nn.Module,
    batches: Sequence[Any],
    config: Config,
    blocks_of: Callable[[nn.Module], Sequence[nn.Module] | None] | None,
) -> tuple[Trained, int, str] | Exception:
    """blocks_of: returns the blocks of `train_batch`, or None for none; None: call `backward` and `step`."""
    twin = copy.deepcopy(model)
    try:
        with open_engine(twin, config) as engine:
            seed_all(7)
            reason = ""
            if blocks_of is None:
                losses = train(engine, batches, loss_of)
            else:
                iterator = iter([batch for (batch,) in batches])
                blocks = blocks_of(twin)
                losses = [engine.train_batch(iterator, loss_fn, blocks=blocks).item() for _ in range(STEPS)]
                reason = "it has no list of modules" if blocks is None else engine._batches.reason
            trained = Trained(Result(losses, parameters_of(engine)), dict(twin.named_buffers()))
            return trained, len(engine.units), reason
    except Exception as error:  # noqa: BLE001 - any: it is a difference
        return error


def _compared(
    found: tuple[Trained, int, str] | Exception, expected: Trained, with_torch: Trained, named: tuple[str, str]
) -> Run:
    if isinstance(found, Exception):
        return Run(*named, problem=first_line(found))
    trained, units, order = found
    is_loop = named[0] == "loop"
    apart, adam = (
        _apart(trained.result, other.result if is_loop else other.of_steps) for other in (expected, with_torch)
    )
    other = _other(trained.buffers, expected.buffers)
    return Run(*named, units, *apart, adam, "" if is_loop else order, f"buffer {other} differs" if other else "")


def _apart(one: Result, other: Result) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and that of all parameters; infinity for NaN."""
    scale = max(map(abs, other.losses)) or 1.0
    loss = max(abs(a - b) / max(abs(b), 1e-3 * scale) for a, b in zip(one.losses, other.losses, strict=True))
    parameters = distance(one, other)
    return tuple(x if x == x else math.inf for x in (loss, parameters))  # type: ignore[return-value]


def _other(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Return the name of a buffer that differs; empty: none does. NaN equals NaN."""
    for name, value in other.items():
        if value.shape != one[name].shape or not torch.equal(value.nan_to_num(), one[name].nan_to_num()):
            return name
    return ""

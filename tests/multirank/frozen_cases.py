"""Code of the ranks in test_frozen.py: a frozen base in a code, with adapters, beside the rounded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.errors import InfinityError, RanksError, UsageError
from infinity.optim.frozen import frozen_values
from infinity.plan.frozen import FrozenFormat
from multirank.cases import SAMPLES, device_of, global_batches, part
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import adapted, seeded

BASE = "blocks.1.up.base.weight"


def trained(
    rank: int, *, ranks: int, folder: str, late: bool, format: FrozenFormat, rounded: bool, **options: Any
) -> dict[str, Any]:
    """Train with `infinity.frozen`, or as it is a model that has the rounded values. Returns losses and parameters."""
    model = seeded(adapted)
    if rounded:
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                parameter.data = frozen_values(parameter.data.bfloat16(), format).float()
    frozen = {} if rounded else {"frozen": format}
    config = engine_config(folder=folder, micro=SAMPLES, bf16=True, **frozen, **options)
    with open_engine(model, config, device_of(rank, late)) as engine:
        losses = train(engine, [part(batch, rank) for batch in global_batches(3, SAMPLES * ranks)])
        return {"losses": losses, "values": parameters_of(engine)}


def edited(rank: int, *, folder: str, format: FrozenFormat) -> dict[str, Any]:
    """Set a frozen parameter to values of the code on all ranks; then to others, which is refused."""
    config = engine_config(folder=folder, micro=SAMPLES, frozen=format)
    model = seeded(adapted)
    outcome: dict[str, Any] = {}
    try:
        with open_engine(model, config, device_of(rank, late=False)) as engine:
            parameter = dict(model.named_parameters())[BASE]
            wanted = frozen_values(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), format)
            with infinity.GatheredParameters([parameter], modifier_rank=1):
                if rank == 1:
                    parameter.data.copy_(wanted)
            outcome["kept"] = torch.equal(parameters_of(engine)[BASE], wanted)
            with infinity.GatheredParameters([parameter], modifier_rank=0):
                if rank == 0:
                    parameter.data.add_(0.01)
    except (UsageError, RanksError) as error:
        outcome["error"] = str(error)
    return outcome


def refused(rank: int, *, folder: str, format: FrozenFormat) -> str:
    """A value that is not finite, in the shard of one rank only."""
    model = seeded(adapted)
    model.blocks[2].down.base.weight.data[-1, -1] = float("nan")
    try:
        open_engine(model, engine_config(folder=folder, frozen=format), device_of(rank, late=False)).close()
    except InfinityError as error:
        return str(error)
    return ""


def resumed(rank: int, *, folder: str, format: FrozenFormat, other: str) -> list[bool]:
    """Save with one format, and load with another: values are those of the saved ones, rounded."""
    same = []
    path = Path(folder) / "checkpoint"
    with open_engine(
        seeded(adapted), engine_config(folder=folder, frozen=format), device_of(rank, late=False)
    ) as engine:
        train(engine, [part(batch, rank) for batch in global_batches(1, 2 * SAMPLES)])
        engine.save_checkpoint(path)
        saved = parameters_of(engine)
    for again in (format, other):
        config = engine_config(folder=folder, frozen=again)
        with open_engine(seeded(adapted, 5), config, device_of(rank, late=False)) as engine:
            engine.load_checkpoint(path)
            for name, value in parameters_of(engine).items():
                coded = (
                    again not in (format, "as_is") and value.dim() > 1 and (".base." in name or "." not in name[:-7])
                )
                expected = frozen_values(saved[name], again) if coded else saved[name]  # type: ignore[arg-type]
                same.append(torch.equal(value, expected))
    return same

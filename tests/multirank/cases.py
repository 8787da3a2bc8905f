"""Code of the ranks in this folder's tests. These functions run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.checkpoint.pretrained import SavedTensor
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, NonFiniteError, RanksError, UsageError
from infinity.tiers.device import CpuDevice, Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, parameters_of, train
from support.mapped import kept
from support.models import Stack, seeded, token_batches
from support.states import states_of

SAMPLES = 4
"""Samples of one micro-batch of one rank."""

Batch = tuple[torch.Tensor, torch.Tensor]


def global_batches(steps: int, samples: int) -> list[Batch]:
    return token_batches(steps, batch=samples)


def part(batch: Batch, number: int) -> Batch:
    """Return the `number`-th SAMPLES samples of a global batch."""
    rows = slice(number * SAMPLES, (number + 1) * SAMPLES)
    return batch[0][rows], batch[1][rows]


def stack() -> Stack:
    return Stack(depth=3)


def device_of(rank: int, late: bool) -> Device:
    """Return a CPU device, or one whose copies are delayed by the rank, so that ranks drift apart."""
    return LateDevice(delay=0.002 + 0.02 * rank) if late else CpuDevice()


def training(
    rank: int, *, ranks: int, steps: int, folder: str, late: bool = False, seed: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train on this rank's part of every global batch.

    Returns losses (one a step, the mean of its micro-batches), norms, and what is there at the end. seed: of this
    rank's initial values; the same on all ranks by default.
    """
    accumulation = options.get("accumulation", 1)
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    model = seeded(lambda: Stack(width=32, depth=3, tied=True), 0 if seed is None else seed + rank)
    device = device_of(rank, late)
    with open_engine(model, config, device) as engine:
        losses = []
        norms = []
        for batch in global_batches(steps, SAMPLES * accumulation * ranks):
            # Micro-batch by micro-batch over all ranks, as one rank would take them one after another.
            mine = [part(batch, number * ranks + rank) for number in range(accumulation)]
            losses.append(sum(train(engine, mine)) / accumulation)
            norms.append(engine.get_global_grad_norm())
        values = parameters_of(engine) | states_of(engine)
        held, skipped = engine.ledger.tier_bytes(), engine.skipped_steps
        traffic = engine.parts.ranks.traffic
        if isinstance(device, LateDevice):  # what a collective wrote is there when it ends
            ended = [point for point in device.reached if point.thread.startswith("infinity-comm")]
            assert len(ended) >= traffic.all_gathers + traffic.reduce_scatters + traffic.all_reduces
            assert all(point.waited for point in ended)
        return {"losses": losses, "norms": norms, "values": values, "held": held, "skipped": skipped}


def one_rank(steps: int, ranks: int, *, folder: str, accumulated: bool, **options: Any) -> dict[str, Any]:
    """Train on the same global batches with one rank, with the ranks' samples as accumulation or in one micro-batch."""
    accumulation = options.pop("accumulation", 1)
    times = ranks if accumulated else 1
    samples = SAMPLES * ranks // times
    config = engine_config(folder=folder, micro=samples, accumulation=accumulation * times, **options)
    with open_engine(seeded(lambda: Stack(width=32, depth=3, tied=True)), config) as engine:
        losses = []
        norms = []
        for tokens, targets in global_batches(steps, SAMPLES * accumulation * ranks):
            cut = zip(tokens.split(samples), targets.split(samples), strict=True)
            losses.append(sum(train(engine, list(cut))) / (accumulation * times))
            norms.append(engine.get_global_grad_norm())
        values = parameters_of(engine) | states_of(engine)
        held, skipped = engine.ledger.tier_bytes(), engine.skipped_steps
        return {"losses": losses, "norms": norms, "values": values, "held": held, "skipped": skipped}


def traffic(rank: int, *, folder: str, accumulation: int = 1, **options: Any) -> list[dict[str, int]]:
    """Return per step the bytes gathered and reduced, and the fetches."""
    config = engine_config(folder=folder, micro=SAMPLES, accumulation=accumulation, **options)
    with open_engine(seeded(lambda: Stack(depth=4)), config) as engine:
        steps = []
        for number in range(4):
            before = counted(engine)
            train(engine, token_batches(accumulation, batch=SAMPLES, seed=10 * number + rank))
            # Prefetches for the next step count for that step, so only whole steps are compared.
            steps.append({name: value - before[name] for name, value in counted(engine).items()})
        steps.append(
            {
                "units": len(engine.units),
                "bytes": sum(unit.layout.nbytes for unit in engine.units),
                "shards": sum(unit.layout.shard_nbytes for unit in engine.units),
            }
        )
        return steps


def reduced_in_backward(rank: int, *, folder: str, update: str) -> list[int]:
    """Count, step by step, the units whose gradients were reduced before the first block's backward began."""
    config = engine_config(folder=folder, micro=SAMPLES, update=update)
    with open_engine(seeded(lambda: Stack(depth=4)), config) as engine:
        model: Any = engine.module
        reduced = 0

        def note(*_: Any) -> None:
            nonlocal reduced
            reduced = engine.parts.ranks.traffic.reduce_scatters

        model.blocks[0].register_full_backward_pre_hook(note)
        steps = []
        for batch in token_batches(4, batch=SAMPLES, seed=rank):
            before = engine.parts.ranks.traffic.reduce_scatters
            train(engine, [batch])
            steps.append(reduced - before)
        return steps


def counted(engine: TrainingEngine) -> dict[str, int]:
    seen = engine.parts.ranks.traffic
    return {
        "all_gathers": seen.all_gathers,
        "all_gather_bytes": seen.all_gather_bytes,
        "reduce_scatters": seen.reduce_scatters,
        "reduce_scatter_bytes": seen.reduce_scatter_bytes,
        "all_reduces": seen.all_reduces,
        "all_reduce_bytes": seen.all_reduce_bytes,
        "fetches": engine.ledger.snapshot().fetches,
    }


def extents(rank: int, *, folder: str, param: str, optim: str, **options: Any) -> dict[str, Any]:
    """Return (unit, state) → extent of this rank. Units are large compared with the rounding of extents."""
    config = engine_config(param, optim, folder=folder, micro=SAMPLES, **options)
    with open_engine(seeded(lambda: Stack(width=128, depth=4)), config) as engine:
        placed = engine.parts.plan.placement
        return {
            "extents": {(unit, state.value): (e.tier, e.nbytes) for (unit, state), e in placed.extents.items()},
            "tiers": dict(placed.nbytes),
            "held": engine.ledger.tier_bytes(),
        }


class Branching(nn.Module):
    """A model whose data select another path every step; some blocks run twice, some never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(depth=5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, path: list[int]) -> torch.Tensor:
        x = self.body.embedding(tokens)
        for number in path:
            x = self.body.blocks[number](x)
        return F.cross_entropy(self.body.head(x).flatten(0, 1), targets.flatten())


PATHS = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3], [0, 1, 2, 3, 4], [3], [0, 1, 2, 3, 4]]


def branching(rank: int, *, ranks: int, folder: str, update: str, late: bool = False) -> dict[str, Any]:
    """Train along PATHS, the same on every rank."""
    accumulation = 1 if ranks > 1 else 2
    config = engine_config(folder=folder, micro=SAMPLES, update=update, accumulation=accumulation)
    with open_engine(seeded(Branching), config, device_of(rank, late)) as engine:
        losses = []
        for batch, path in zip(global_batches(len(PATHS), 2 * SAMPLES), PATHS, strict=True):
            mine = [part(batch, rank)] if ranks > 1 else [part(batch, 0), part(batch, 1)]
            losses.append(sum(train(engine, [(*piece, path) for piece in mine])) / len(mine))
        return {"losses": losses, "values": parameters_of(engine) | states_of(engine)}


class Expert(nn.Module):
    """A block of four experts; each sample uses one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x.mean(1)).softmax(-1)
        weight, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out = out.index_put((mine,), weight[mine, None, None] * expert(x[mine]).tanh())
        return x + out


class Routed(nn.Module):
    """A model whose data decide which experts run and get gradients; its blocks always run."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(depth=2)
        self.body.blocks = nn.ModuleList(Expert(32) for _ in range(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.body(tokens, targets)
        return loss


def routed(rank: int, *, ranks: int, folder: str, steps: int, **options: Any) -> dict[str, Any]:
    """Train experts; return how often each rank used each of them."""
    accumulation = 1 if ranks > 1 else 2
    config = engine_config(folder=folder, micro=SAMPLES, accumulation=accumulation, **options)
    used = [0] * 16
    model = seeded(Routed)
    for number, block in enumerate(model.body.blocks):
        for kind, expert in enumerate(block.experts):
            expert.register_forward_hook(lambda *_, at=4 * number + kind: used.__setitem__(at, used[at] + 1))
    with open_engine(model, config) as engine:
        losses = []
        for batch in global_batches(steps, 2 * SAMPLES):
            mine = [part(batch, rank)] if ranks > 1 else [part(batch, 0), part(batch, 1)]
            losses.append(sum(train(engine, mine)) / len(mine))
        values = parameters_of(engine) | states_of(engine)
        counts = {slot.name: n for unit in engine.units for slot, n in zip(unit.layout.slots, unit.steps, strict=True)}
        return {"losses": losses, "values": values, "used": used, "steps": counts}


def apart(rank: int, *, folder: str, stage: int, paths: list[list[int]], clip: float) -> dict[str, Any]:
    """Ranks take the same path for two steps, and then their own of `paths`."""
    config = engine_config("none", "none", folder=folder, micro=SAMPLES, stage=stage, prefetch_bytes=0, clip=clip)
    began = time.perf_counter()
    outcome: dict[str, Any] = {"raised": "", "stopped": ""}
    with open_engine(seeded(Branching), config) as engine:
        batch = token_batches(1, batch=SAMPLES, seed=rank)[0]
        train(engine, [(*batch, [0, 1, 2, 3, 4])] * 2)
        try:
            train(engine, [(*batch, paths[rank])] * 2)
        except RanksError as error:
            outcome["raised"] = str(error)
        try:
            engine(*batch, [0])
        except UsageError as error:
            outcome["stopped"] = str(error)
    return outcome | {"seconds": time.perf_counter() - began}


def bad_loss(rank: int, *, folder: str, where: int, later: bool = False, viewed: bool = False) -> dict[str, Any]:
    """The loss is infinite only on rank `where` in the third step; training then continues with the next batch.

    later: the loss is checked while its backward is issued, as on an accelerator. viewed: a view of a parameter is kept
    and edited after the error.
    """
    config = engine_config(folder=folder, micro=SAMPLES)
    device = device_of(rank, late=later)
    with warnings.catch_warnings(), open_engine(seeded(stack), config, device) as engine:
        warnings.simplefilter("ignore")
        raised = ""
        losses = []
        views: list[torch.Tensor] = []
        if engine._loss_reader is not None:
            engine._loss_reader.can_read = lambda loss: True  # type: ignore[method-assign]
        for number, batch in enumerate(token_batches(5, batch=SAMPLES, seed=rank)):
            if number == 1 and viewed:
                views = [list(engine.module.parameters())[4].data.view(-1)[:8]]
            values = [view.clone() for view in views]
            loss = engine(*batch)
            if number == 2 and rank == where:
                loss = loss + math.inf  # its gradients are finite
            try:
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            except NonFiniteError as error:
                raised = f"{number}: {error}"
                for view, value in zip(views, values, strict=True):
                    assert torch.equal(view, value)
                    view.add_(0.5)
        return {"raised": raised, "losses": losses, "steps": engine.global_steps}


def bad_gradient(rank: int, *, folder: str, where: int, update: str, clip: float) -> dict[str, Any]:
    """A gradient is NaN on rank `where` only, the loss is finite everywhere.

    Returns which step raised what, whether all parameters are still finite, and whether the engine refuses to go on.
    """
    config = engine_config(folder=folder, micro=SAMPLES, update=update, clip=clip)
    outcome: dict[str, Any] = {"raised": "", "stopped": False}
    with open_engine(seeded(stack), config) as engine:
        batches = token_batches(5, batch=SAMPLES, seed=rank)
        try:
            for number, batch in enumerate(batches):
                loss = engine(*batch)
                if number == 2 and rank == where:
                    loss.register_hook(lambda gradient: gradient * math.nan)
                engine.backward(loss)
                engine.step()
        except NonFiniteError as error:
            outcome["raised"] = f"{number}: {error}"
        outcome["finite"] = all(torch.isfinite(value).all() for value in parameters_of(engine).values())
        try:
            engine(*batches[0])
        except UsageError:
            outcome["stopped"] = True
    return outcome


def unequal_pace(rank: int, *, folder: str, steps: int, **options: Any) -> list[float]:
    """Return the losses while rank 1 pauses at random places."""
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    generator = torch.Generator().manual_seed(5)

    def stutter(*_: Any) -> None:
        if rank == 1 and torch.rand((), generator=generator) < 0.3:
            time.sleep(0.003)

    model = seeded(lambda: Stack(depth=4, tied=True))
    for module in model.modules():
        module.register_forward_pre_hook(stutter)
        module.register_full_backward_pre_hook(stutter)
    with open_engine(model, config, device_of(1 - rank, late=True)) as engine:
        return train(engine, token_batches(steps, batch=SAMPLES, seed=rank))


def save(rank: int, *, folder: str, directory: str, steps: int, **options: Any) -> dict[str, Any]:
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    with open_engine(seeded(stack), config) as engine:
        train(engine, token_batches(steps, batch=SAMPLES, seed=rank))
        engine.save_checkpoint(Path(directory), "two")
        return states_of(engine)


def load(rank: int, *, folder: str, directory: str, **options: Any) -> dict[str, Any]:
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    with open_engine(seeded(stack, 7), config) as engine:
        engine.load_checkpoint(Path(directory))
        return states_of(engine)


def interrupted(rank: int, *, folder: str, directory: str) -> dict[str, Any]:
    """Return this rank's random numbers after a save and after loading it, and the error about an altered file."""
    saved = Path(directory)
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        torch.manual_seed(rank)
        engine.save_checkpoint(saved, "one")
        drawn = [float(torch.rand(()))]
        engine.load_checkpoint(saved)
        drawn.append(float(torch.rand(())))
        if rank == 0:
            file = saved / "one" / "unit-00001.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        engine.ranks.barrier()
        try:
            engine.load_checkpoint(saved)
        except CheckpointError as error:
            return {"drawn": drawn, "said": str(error)}
        return {"drawn": drawn, "said": ""}


def pretrained(rank: int, *, folder: str, directory: str, loading: list[bool], **options: Any) -> dict[str, Any]:
    """States and parameters of a model that is read from `directory`, and how many elements of it this rank read.

    loading: by rank, whether it calls `load_pretrained`.
    """
    read = 0
    real = SavedTensor.read

    def counting(self: SavedTensor, start: int, stop: int) -> torch.Tensor:
        nonlocal read
        read += stop - start
        return real(self, start, stop)

    with torch.device("meta"):
        model = Stack(tied=True)
    if loading[rank]:
        infinity.load_pretrained(model, directory)
    SavedTensor.read = counting  # type: ignore[method-assign]
    try:
        with open_engine(model, engine_config(folder=folder, micro=SAMPLES, **options)) as engine:
            return {"values": states_of(engine) | engine.state_dict(), "read": read}
    except RanksError as error:
        return {"error": str(error)}
    finally:
        SavedTensor.read = real  # type: ignore[method-assign]


def constructed(rank: int, *, folder: str, stage: int, bf16: bool) -> dict[str, Any]:
    """Return initial and trained values of models built under `infinity.Init`, with another seed on every rank."""
    param = "nvme" if stage == 3 else "none"
    config = engine_config(param, folder=folder, micro=SAMPLES, stage=stage, bf16=bf16, unit_size=4096)
    with infinity.Init(config):
        model = seeded(lambda: Stack(depth=4, tied=True), rank)
    built = kept(model.parameters())
    with open_engine(model, config) as engine:
        values = states_of(engine) | engine.state_dict()
        return {"kept": built, "values": values, "losses": train(engine, token_batches(2, batch=SAMPLES, seed=rank))}


def accessed(rank: int, *, folder: str, stage: int) -> dict[str, Any]:
    """Rank 1 changes a parameter; every rank reads it, its gradient and a moment, and sets them."""
    config = engine_config("none", "cpu", folder=folder, micro=SAMPLES, stage=stage, bf16=True, update="next_forward")
    with open_engine(seeded(lambda: Stack(depth=4)), config) as engine:
        train(engine, token_batches(2, batch=SAMPLES, seed=rank))
        weight = engine.module.blocks[1].up.weight
        with infinity.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
            if rank == 1:
                weight.fill_(0.125)
        found = {"param": infinity.get_full_fp32_param(weight)}
        engine.backward(engine(*token_batches(1, batch=SAMPLES, seed=rank)[0]))
        gradient = infinity.get_full_grad(weight)
        assert gradient is not None
        found["grad"] = gradient
        infinity.set_full_grad(weight, torch.ones_like(gradient))
        infinity.set_full_optimizer_state(weight, "exp_avg", torch.zeros_like(gradient))
        engine.step()
        found["exp_avg"] = infinity.get_full_optimizer_state(weight, "exp_avg")
        found |= {f"after/{name}": value for name, value in engine.state_dict().items()}
        return {"values": found}


def refused(rank: int, *, folder: str) -> list[str]:
    """Fail twice to construct an engine, then construct one."""
    errors = []
    for _ in range(2):
        try:
            open_engine(seeded(stack), engine_config(folder=folder + "/missing", micro=SAMPLES))
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(f"{type(error).__name__}: {error}")
    with open_engine(seeded(stack), engine_config(folder=folder, micro=SAMPLES)) as engine:
        train(engine, token_batches(2, batch=SAMPLES, seed=rank))
    return errors

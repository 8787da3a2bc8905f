"""Code of four ranks: tensor parallelism over two, and units sharded over two."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, ModelError, UsageError
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.loops import train
from support.models import Stack, seeded


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def divided(mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Return a Stack whose blocks are sharded by columns and rows, and its norms over the sequence if requested."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = seeded(lambda: Stack(width=32, depth=3, tied=True))
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if sequence:  # the residual stream is divided too: whole again where the head takes it
        enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        leave = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(model.blocks[0], mesh, enter)
        parallelize_module(model.blocks[-1], mesh, leave)
    return model


def trained(rank: int, *, folder: str, steps: int, sequence: bool = False, **options: Any) -> dict[str, Any]:
    """Return losses (of this replica), norms, and all final parameters, unsharded."""
    mesh = mesh_of()
    model = divided(mesh["tp"], sequence=sequence)
    accumulation = options.get("accumulation", 1)
    with opened(model, mesh["dp"], folder, **options) as engine:
        losses, norms = [], []
        for batch in global_batches(steps, SAMPLES * accumulation * 2):
            mine = [part(batch, number * 2 + engine.ranks.rank) for number in range(accumulation)]
            losses.append(sum(train(engine, mine)) / accumulation)
            norms.append(engine.get_global_grad_norm())
        return {"losses": losses, "norms": norms, "values": engine.state_dict(), "units": len(engine.units)}


def opened(model: nn.Module, group: Any, folder: str, **options: Any) -> TrainingEngine:
    config = engine_config(folder=folder, micro=SAMPLES, **options)
    return infinity.initialize(model=model, config=config, device=CpuDevice(), process_group=group)[0]


def accessed(rank: int, *, folder: str) -> dict[str, torch.Tensor]:
    """Return masters, moments and gradients of tensor-parallel parameters, before and after they are set."""
    mesh = mesh_of()
    found = {}
    with opened(divided(mesh["tp"], sequence=True), mesh["dp"], folder, clip=1.0, bf16=True) as engine:
        block = engine.module.blocks[2]
        for name, weight in (("columns", block.up.weight), ("rows", block.down.weight), ("copied", block.norm.weight)):
            value = torch.arange(weight.numel()).view(weight.shape) / weight.numel()
            infinity.set_full_fp32_param(weight, value)
            infinity.set_full_optimizer_state(weight, "exp_avg", -value)
            found[f"{name}/set"] = value
            found[f"{name}/param"] = infinity.get_full_fp32_param(weight)
            found[f"{name}/exp_avg"] = -infinity.get_full_optimizer_state(weight, "exp_avg")
        engine.backward(engine(*part(global_batches(1, 2 * SAMPLES)[0], engine.ranks.rank)))
        for name, weight in (("columns", block.up.weight), ("rows", block.down.weight), ("copied", block.norm.weight)):
            gradient = infinity.get_full_grad(weight)
            assert gradient is not None
            infinity.set_full_grad(weight, torch.full_like(gradient, 0.25))
            found[f"grad/{name}"] = gradient
            found[f"grad/{name}/set"] = infinity.get_full_grad(weight)
        gradients = [infinity.get_full_grad(weight) for weight in engine.module.parameters()]
        found["squares"] = sum(gradient.double().square().sum() for gradient in gradients)
        engine.step()
        found["norm"] = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
        with pytest.raises(UsageError, match="tensor parallelism, which it does not support"):
            next(infinity.stream_weights(engine))
        assert engine.state_dict()  # the ranks are in step
    return found


def pairs(rank: int, *, folder: str, steps: int) -> dict[str, Any]:
    """Train two independent models with two replicas each: on ranks 0 and 2, and on ranks 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = seeded(lambda: Stack(width=32, depth=3, tied=True), rank % 2)
    with opened(model, groups[rank % 2], folder) as engine:
        batches = [part(batch, engine.ranks.rank) for batch in global_batches(steps, 2 * SAMPLES)]
        return {"losses": train(engine, batches), "values": engine.state_dict(), "size": engine.ranks.size}


def one_after_another(rank: int, *, folder: str) -> list[list[float]]:
    """Engines over the same half of the ranks, which come to make the next one at different times. Some of them know of
    more groups than others.
    """
    mesh = mesh_of()
    dist.new_group([0, 1])
    found = []
    for _ in range(3):
        time.sleep(0.5 * (rank // 2))
        with opened(seeded(lambda: Stack(depth=2)), mesh["dp"], folder) as engine:
            found.append(train(engine, [part(global_batches(1, 2 * SAMPLES)[0], engine.ranks.rank)]))
    return found


def refused(rank: int, *, folder: str) -> dict[str, str]:
    """Return the errors for process groups that do not fit the model."""
    mesh = mesh_of()
    others = dist.new_group([0, 1])
    said = {}
    for name, model, group in (
        ("the whole mesh", seeded(Stack), mesh),
        ("a group of others", seeded(Stack), others if rank > 1 else mesh),
        ("no group", divided(mesh["tp"]), None),
        ("the wrong group", divided(mesh["tp"]), mesh["tp"]),
    ):
        try:
            opened(model, group, folder).close()
        except (ModelError, UsageError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    try:
        opened(divided(mesh["tp"]), mesh["dp"], folder, frozen="8bit").close()
    except ConfigError as error:
        said["a code"] = str(error)
    return said


def saved(rank: int, *, folder: str, directory: str, how: str, **options: Any) -> dict[str, Any]:
    """Train 2 steps, save, train 2 more. Return the later losses and all final states, unsharded."""
    mesh = mesh_of()
    random.seed(0)
    with opened(divided(mesh["tp"], sequence=True), mesh["dp"], folder, **options) as engine:
        batches = [part(batch, engine.ranks.rank) for batch in global_batches(4, 2 * SAMPLES)]
        train(engine, batches[:2])
        engine.save_checkpoint(Path(directory) / how, "a", background=how == "background")
        torch.manual_seed(rank)
        losses = train(engine, batches[2:])
        return {"losses": losses, "values": whole_states(engine)}


def loaded(rank: int, *, folder: str, directory: str, **options: Any) -> dict[str, Any]:
    """Load, and train the last 2 steps."""
    mesh = mesh_of()
    with opened(divided(mesh["tp"], sequence=True), mesh["dp"], folder, **options) as engine:
        batches = [part(batch, engine.ranks.rank) for batch in global_batches(4, 2 * SAMPLES)]
        engine.load_checkpoint(directory)
        at_first = whole_states(engine)
        losses = train(engine, batches[2:])
        return {"losses": losses, "values": whole_states(engine), "at first": at_first}


def whole_states(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return "parameter/state" → master and moments in fp32."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name}/master"] = infinity.get_full_fp32_param(parameter)
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{moment}"] = infinity.get_full_optimizer_state(parameter, moment)
    return found

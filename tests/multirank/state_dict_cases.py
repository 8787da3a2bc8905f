"""Cases that ranks run in test_state_dict.py: torch's state dict of the optimizer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.errors import ConfigError, RanksError
from infinity.tiers.device import CpuDevice
from multirank.cases import SAMPLES, global_batches, part
from multirank.mesh_cases import divided, mesh_of, opened, whole_states
from support.ademamix import AdEMAMix
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded
from support.states import states_of


def model(seed: int = 0) -> nn.Module:
    return seeded(lambda: Stack(width=32, depth=4), seed)


ADEMAMIX: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95, 0.99], "t_alpha": 5, "t_beta3": 4, "eps": 1e-4}


def plainly(steps: int, later: int, samples: int, ademamix: bool = False) -> dict[str, Any]:
    """Return state and parameters of torch's AdamW after `steps`, and losses and parameters of `later` more steps."""
    trained = model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.01)
    if ademamix:
        optimizer = AdEMAMix(trained.parameters(), **ADEMAMIX)
    found: dict[str, Any] = {"losses": []}
    for number, batch in enumerate(global_batches(steps + later, samples)):
        if number == steps:
            found |= {"state": copy.deepcopy(optimizer.state_dict()), "parameters": copy.deepcopy(trained.state_dict())}
        loss = trained(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= steps:
            found["losses"].append(loss.item())
    return found | {"values": trained.state_dict(), "later state": optimizer.state_dict()}


def from_torch(
    rank: int,
    *,
    given: dict[str, Any],
    steps: int,
    later: int,
    folder: str,
    client: bool = False,
    ademamix: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train on from torch's optimizer state. Returns this rank's losses and the final states.

    client: pass an optimizer with that state to `infinity.initialize`, and a scheduler that keeps the rate.
    """
    config = engine_config(folder=folder, micro=SAMPLES, eps=1e-4, **options)
    if ademamix:
        section = {"optimizer": {"type": "AdEMAMix", "params": ADEMAMIX}}
        config = Config.load({**config.model_dump(mode="json", exclude_unset=True), **section})
    started = model(3)
    started.load_state_dict(given["parameters"])
    optimizer = torch.optim.AdamW(started.parameters(), lr=1.0) if client else None
    if optimizer is not None:
        optimizer.load_state_dict(given["state"])
    device, constant = CpuDevice(), partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    with infinity.initialize(
        started, config, optimizer=optimizer, lr_scheduler=constant if client else None, device=device
    )[0] as engine:
        if not client:
            engine.optimizer.load_state_dict(given["state"])
        at_first = engine.optimizer.state_dict()
        batches = global_batches(steps + later, SAMPLES * engine.ranks.size)[steps:]
        losses = train(engine, [part(batch, rank) for batch in batches])
        later_state = engine.optimizer.state_dict()
        return {
            "losses": losses,
            "values": parameters_of(engine),
            "at first": at_first,
            "later state": later_state,
        }


def differing(rank: int, *, given: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load states that differ between ranks, then one that only one rank refuses, then equal ones."""
    said = {}
    with open_engine(model(), engine_config(folder=folder, micro=SAMPLES)) as engine:
        before = states_of(engine)
        for name, number, change in (("states", 1, {}), ("groups", 0, {"lr": 0.5 if rank else 0.25})):
            other = copy.deepcopy(given["state"])
            other["state"][0]["exp_avg"][0, 0] += number * rank
            other["param_groups"][0].update(change)
            said[name] = refused(engine, other)
        other = copy.deepcopy(given["state"])
        other["param_groups"][0]["amsgrad"] = rank == 1
        said["amsgrad"] = refused(engine, other)
        same = all(torch.equal(value, before[name]) for name, value in states_of(engine).items())
        engine.optimizer.load_state_dict(given["state"])
        return {"said": said, "unchanged": same, "losses": train(engine, [global_batches(1, SAMPLES)[0]])}


def refused(engine: Any, state: dict[str, Any]) -> str:
    try:
        engine.optimizer.load_state_dict(state)
    except (ConfigError, RanksError) as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def of_a_mesh(rank: int, *, folder: str) -> dict[str, Any]:
    """Pass whole states to another engine; tensor parallelism divides the model over two ranks, ZeRO over two."""
    mesh = mesh_of()
    batches = global_batches(3, 2 * SAMPLES)
    with opened(divided(mesh["tp"], sequence=True), mesh["dp"], folder) as engine:
        train(engine, [part(batch, engine.ranks.rank) for batch in batches])
        saved, values = engine.optimizer.state_dict(), whole_states(engine)
    names = [name for name, _ in engine.module.named_parameters()]
    with opened(divided(mesh["tp"], sequence=True), mesh["dp"], folder) as engine:
        engine.optimizer.load_state_dict(saved)
        return {"names": names, "state": saved["state"], "values": values, "again": whole_states(engine)}

"""Cases that ranks run in test_state_dict.py: torch's state dict of the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, RanksError
from multirank.cases import SAMPLES, global_batches, part
from multirank.mesh_cases import divided, mesh_of, opened, whole_states
from support.configs import engine_config
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded
from support.states import states_of


def model(seed: int = 0) -> nn.Module:
    return seeded(lambda: Stack(width=32, depth=4), seed)


def plainly(steps: int, later: int, samples: int) -> dict[str, Any]:
    """Return state and parameters of torch's AdamW after `steps`, and losses and parameters of `later` more steps."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.01)
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
    rank: int, *, given: dict[str, Any], steps: int, later: int, folder: str, **options: Any
) -> dict[str, Any]:
    """Train on from torch's optimizer state. Returns this rank's losses and the final states."""
    config = engine_config(folder=folder, micro=SAMPLES, eps=1e-4, **options)
    started = model(3)
    started.load_state_dict(given["parameters"])
    with open_engine(started, config) as engine:
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

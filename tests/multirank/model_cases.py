"""Models with more than a sequence of blocks. These functions run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.config import TorchAutocast
from multirank.cases import SAMPLES, Batch, Routed, global_batches, part
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine, parameters_of
from support.models import Block, Stack, seeded
from support.states import states_of


def checkpointed(reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return out

    return run


def twice(reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Run every block twice in a row, each time under checkpointing."""
    run = checkpointed(reentrant)
    return lambda block, x: run(block, run(block, x))


class CheckpointedExperts(Routed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body.run = checkpointed(reentrant)


class Sided(Block):
    """A block with a parameter that only samples of one kind use, and one that no sample uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.side = nn.Parameter(torch.ones(width))
        self.unused = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, sided: bool = False) -> torch.Tensor:
        return super().forward(x * self.side if sided else x)


class OneSided(Stack):
    """Batches whose first token is odd use the parameters `side`."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.blocks = nn.ModuleList(Sided(32) for _ in range(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, sided=bool(tokens[0, 0] % 2))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def in_one_tensor() -> nn.Module:
    """Blocks whose parameters are slices of one tensor each, so that they share autograd's count of edits."""
    model = Stack()
    blocks = [block.state_dict() for block in model.blocks]
    for name in blocks[0]:
        rows = torch.stack([block[name] for block in blocks])
        for block, row in zip(model.blocks, rows.unbind(), strict=True):
            block.load_state_dict({**block.state_dict(), name: row}, assign=True)
    return model


def sided_batches(steps: int) -> list[Batch]:
    """Return global batches of two micro-batches, of which only the second is odd."""
    found = []
    for tokens, targets in global_batches(steps, 2 * SAMPLES):
        tokens = tokens.clone()
        tokens[0, 0] = 2
        tokens[SAMPLES, 0] = 3
        found.append((tokens, targets))
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Stack(depth=5, tied=True),
    "reentrant": lambda: Stack(depth=5, tied=True, run=checkpointed(True)),
    "non-reentrant": lambda: Stack(depth=5, tied=True, run=checkpointed(False)),
    "reentrant, twice": lambda: Stack(depth=4, run=twice(True)),
    "non-reentrant, twice": lambda: Stack(depth=4, run=twice(False)),
    "experts, reentrant": lambda: CheckpointedExperts(True),
    "experts, non-reentrant": lambda: CheckpointedExperts(False),
    "one-sided": OneSided,
    "in one tensor": in_one_tensor,
}


def modelled(
    rank: int, *, ranks: int, model: str, folder: str, steps: int = 3, autocast: str = "", **options: Any
) -> dict[str, Any]:
    """Train MODELS[model] on two micro-batches a step, one on each of two ranks or both on one.

    autocast: what of the loop is in a context of torch.autocast, "forward" or "loop"; "config": the section
    torch_autocast. Returns losses, what is there at the end and how often each parameter was updated; buffers must all
    be back, and none have been kept.
    """
    accumulation = 2 // ranks
    config = engine_config(**{"folder": folder, "micro": SAMPLES, "accumulation": accumulation, **options})
    if autocast == "config":
        config = config.model_copy(update={"torch_autocast": TorchAutocast(enabled=True, dtype="bf16")})
    batches = sided_batches(steps) if model == "one-sided" else global_batches(steps, 2 * SAMPLES)

    def bf16(what: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if what == autocast else nullcontext()

    losses = []
    with open_engine(seeded(MODELS[model]), config) as engine:
        with bf16("loop"):
            for batch in batches:
                total = 0.0
                for number in range(accumulation):
                    with bf16("forward"):
                        loss = engine(*part(batch, number * ranks + rank))
                    engine.backward(loss)
                    engine.step()
                    total += loss.item()
                    del loss
                losses.append(total / accumulation)
        values = parameters_of(engine) | states_of(engine)
        counts = {slot.name: n for unit in engine.units for slot, n in zip(unit.layout.slots, unit.steps, strict=True)}
        assert len(engine.units) > 5 and not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)
    return {"losses": losses, "values": values, "steps": counts}


class Normed(nn.Module):
    """Linear layers and batch norms, and a random buffer: (batch, width) → mean squared error."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(4))
        self.register_buffer("noise", torch.randn(width))
        self.register_buffer("unsaved", torch.randn(width, width).t(), persistent=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x + self.noise
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x @ self.unsaved, targets)


def normed(rank: int, *, folder: str, directory: str, stage: int) -> dict[str, Any]:
    """Return this rank's buffers: of its own model, at the start, after training, and after loading a checkpoint."""
    found: dict[str, Any] = {}

    def note(when: str, model: nn.Module) -> None:
        found[when] = {name: buffer.clone() for name, buffer in model.named_buffers()}

    config = engine_config("none", "cpu", folder=folder, micro=SAMPLES, stage=stage, unit_size=2048)
    model = seeded(Normed, rank)
    note("own", model)
    with open_engine(model, config) as engine:
        note("start", model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            x = torch.randn(2, SAMPLES, 32, generator=generator)
            engine.backward(engine(x[0], x[1]))
            engine.step()
        note("trained", model)
        found["values"] = parameters_of(engine)
        engine.save_checkpoint(directory, "one")
        engine.load_checkpoint(directory)
        note("loaded", model)
    return found

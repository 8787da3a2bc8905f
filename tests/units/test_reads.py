"""Parameters read and edited outside the module that owns them: fetched when read, written back when changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.errors import UsageError
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_nothing_leaked, assert_trains_like_plain
from support.loops import open_engine, parameters_of, train
from support.models import VOCABULARY, Block, Stack, seeded, token_batches

BATCHES = token_batches(6)
SCHEDULES = pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 2}], ids=str)


# -- read ------------------------------------------------------------------------------------------------------------


class Borrowing(nn.Module):
    """A block that also uses a weight of another one, as in DeBERTa with its position embedding."""

    def __init__(self, width: int, lender: list[Block]) -> None:
        super().__init__()
        self.block = Block(width)
        self.lender = lender  # in a list, so that it is no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out + 0.1 * F.linear(out, self.lender[0].up.weight).relu() @ self.lender[0].up.weight


class Lending(Stack):
    """A model whose blocks read a weight of the first block, and that reads weights of blocks itself."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        first = self.blocks[0]
        self.blocks = nn.ModuleList([first, *(Borrowing(32, [first]) for _ in range(5))])
        if reentrant is not None:
            self.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        x = F.linear(x, self.blocks[0].up.weight, self.blocks[0].up.bias).relu() @ self.blocks[1].block.up.weight
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@SCHEDULES
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_weight_read_outside_its_module(reentrant: bool | None, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: Lending(reentrant), BATCHES, units=8, **options)


@SCHEDULES
def test_tied_embeddings(options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: Stack(tied=True), BATCHES, units=7, **options)


def test_a_head_that_is_the_embedding_weight_itself() -> None:
    """The weights are tied in code, not in the module tree."""

    class Functional(Stack):
        def __init__(self) -> None:
            super().__init__()
            del self.head

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), targets.flatten())

    assert_trains_like_plain(Functional, BATCHES, units=7)


@SCHEDULES
def test_weights_in_the_loss_outside_the_model(options: dict[str, Any]) -> None:
    """A penalty reads weights after the model's forward, when their units have been evicted."""

    def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        module = getattr(model, "module", model)
        penalty = sum(block.up.weight.square().sum() + block.norm.bias.abs().sum() for block in module.blocks)
        loss: torch.Tensor = model(*batch) + 0.01 * penalty
        return loss

    assert_trains_like_plain(Stack, BATCHES, units=8, loss_of=loss_of, **options)


def test_weights_taken_from_parameters_have_their_values() -> None:
    """`parameters()` hands out parameters of released units; each is fetched by the operation that reads it."""

    def penalised(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        module = getattr(model, "module", model)
        loss: torch.Tensor = model(*batch) + 1e-3 * sum(p.square().sum() for p in module.parameters())
        return loss

    assert_trains_like_plain(Stack, BATCHES, units=8, loss_of=penalised)


def test_shapes_dtypes_and_devices_are_the_parameters_own(make_engine: OpenEngine) -> None:
    model = seeded(Stack)
    before = {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    engine = make_engine(model)
    after = {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    assert after == before
    assert engine.parts.store.fetches == 0


class Passing(Stack):
    """Reads a parameter, and passes it to blocks that run long after other units took the buffers."""

    def __init__(self, reentrant: bool | None = None, depth: int = 8) -> None:
        super().__init__(depth=depth)
        self.reentrant = reentrant

    def block(self, block: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x) + 0.1 * F.linear(F.linear(x, weight).relu(), weight.t())
        return out

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        weight = self.blocks[0].up.weight
        assert isinstance(weight, nn.Parameter)
        for block in self.blocks:
            if self.reentrant is None:
                x = self.block(block, weight, x)
            else:  # kept by the checkpoint, as transformers keeps keyword arguments
                x = checkpoint(partial(self.block, block, weight), x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@SCHEDULES
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_a_parameter_that_is_passed_on(reentrant: bool | None, late: bool, options: dict[str, Any]) -> None:
    """The unit stays resident while a reference to the parameter exists, so no module sees a placeholder."""
    device = LateDevice() if late else None
    make = lambda: Passing(reentrant)  # noqa: E731
    assert_trains_like_plain(make, BATCHES, units=10, device=device, prefetch_bytes=40_000, **options)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=str)
def test_more_parameters_that_are_passed_on_than_fit(options: dict[str, Any], late: bool) -> None:
    """The parameters stay valid while they are referenced, in buffers that are not reused."""

    class Many(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            weights = [block.up.weight for block in self.blocks]
            for block, weight in zip(self.blocks, reversed(weights), strict=True):
                x = block(x) + 0.1 * F.linear(F.linear(x, weight).relu(), weight.t())
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    device = LateDevice() if late else None
    assert_trains_like_plain(lambda: Many(depth=8), BATCHES, units=10, device=device, **options)


def test_a_list_of_parameters_that_the_user_keeps(make_engine: OpenEngine) -> None:
    """A list of parameters, which most loops hold, must neither keep units in their buffers nor warn."""
    engine = make_engine(seeded(Stack), prefetch_bytes=0)
    kept = []
    for batch in BATCHES:
        engine.backward(engine(*batch))
        engine.step()
        kept = list(engine.module.parameters())
    assert len(kept) == len(list(engine.module.parameters()))
    assert not engine.parts.store.kept.warned
    assert_nothing_leaked(engine)


def test_a_bare_parameter_list() -> None:
    """Parameters of a container and of the root itself."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 32)
            self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(6))
            self.scales = nn.ParameterDict({"a": torch.ones(32), "b": torch.zeros(32)})
            self.blocks = nn.ModuleList(Block(32) for _ in range(5))
            self.head = nn.Parameter(torch.randn(VOCABULARY, 32) / 6)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            x = x * self.scales["a"] + self.scales["b"]
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(F.linear(x, self.head).flatten(0, 1), targets.flatten())

    assert_trains_like_plain(Bare, BATCHES, units=6)


# -- edit ------------------------------------------------------------------------------------------------------------


class Renormed(Stack):
    """An embedding that its own forward edits: rows longer than 0.5 are scaled down in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, max_norm=0.5)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@SCHEDULES
def test_max_norm_embeddings(options: dict[str, Any], late: bool) -> None:
    device = LateDevice() if late else None
    result = assert_trains_like_plain(Renormed, BATCHES, units=8, device=device, **options)
    assert len(result.losses) == 6


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
def test_max_norm_edits_are_written_back(late: bool, tmp_path: Path) -> None:
    """A forward without gradients edits rows; the unit is evicted, fetched again, and still has the edits."""
    device = LateDevice() if late else None
    model, reference = seeded(Renormed), seeded(Renormed)
    with open_engine(model, engine_config(folder=tmp_path, prefetch_bytes=0), device) as engine, torch.no_grad():
        for batch in BATCHES[:3]:
            engine(*batch)
            reference(*batch)
        engine.parts.store.release_all()
        assert torch.equal(parameters_of(engine)["embedding.weight"], reference.embedding.weight)
    assert not torch.equal(reference.embedding.weight, seeded(Renormed).embedding.weight)


def halve(module: Any) -> None:
    with torch.no_grad():
        module.blocks[1].up.weight.mul_(0.5)
        module.head.weight.clamp_(-0.1, 0.1)


def halve_data(module: Any) -> None:
    module.blocks[1].up.weight.data.mul_(0.5)
    module.head.weight.data.clamp_(-0.1, 0.1)


def replace_data(module: Any) -> None:
    module.blocks[1].up.weight.data = module.blocks[1].up.weight.data * 0.5
    module.head.weight.data = module.head.weight.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("edit", [halve, halve_data, replace_data])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"param": "none"}, {"update": "after_backward"}], ids=str)
def test_a_users_edit_between_steps(edit: Callable[[Any], None], options: dict[str, Any], late: bool) -> None:
    config = engine_config(prefetch_bytes=0, **options)
    reference = seeded(Stack)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(seeded(Stack), config, LateDevice() if late else None) as engine:
        for batch in BATCHES:
            for module, step in ((engine.module, engine.step), (reference, optimizer.step)):
                loss = module(*batch)
                loss.backward()
                if module is reference and config.gradient_clipping > 0:
                    nn.utils.clip_grad_norm_(reference.parameters(), config.gradient_clipping)
                step()
                edit(module)
            optimizer.zero_grad()
        found = parameters_of(engine)
        assert_nothing_leaked(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert found["head.weight"].abs().max() <= 0.1


def test_an_edit_in_bf16_outlives_the_update(make_engine: OpenEngine) -> None:
    """Both formats of the master adopt the edited value."""
    results = []
    for master in ("remainder", "fp32"):
        engine = make_engine(seeded(Stack), bf16=True, master=master, prefetch_bytes=0, lr=0.0, weight_decay=0.0)
        train(engine, BATCHES[:2])
        halve(engine.module)
        train(engine, BATCHES[2:4])
        results.append(parameters_of(engine))
    assert results[0]["head.weight"].abs().max() <= 0.1001
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def zero(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.zero_()


def zero_data(parameter: torch.Tensor) -> None:
    parameter.data.zero_()


def zero_numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[...] = 0.0


def assign_data(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("edit", [zero, zero_data, zero_numpy, assign_data])
@pytest.mark.parametrize("prefetch", [0, "auto"])
@pytest.mark.parametrize("placement", ["none", "nvme"])
def test_edits_through_parameters_are_kept(
    edit: Callable[[Any], None], prefetch: Any, placement: str, make_engine: OpenEngine
) -> None:
    """`parameters()` hands out parameters of released units: an edit fetches the unit and is written back."""
    engine = make_engine(seeded(Stack), param=placement, optim=placement, prefetch_bytes=prefetch)
    train(engine, BATCHES[:2])
    before = parameters_of(engine)
    engine.settle()
    edit(dict(engine.module.named_parameters())["blocks.1.up.weight"])
    engine(*BATCHES[0])
    engine.settle()
    after = parameters_of(engine)
    assert not after.pop("blocks.1.up.weight").any()
    assert all(torch.equal(before[name], value) for name, value in after.items())


# -- state_dict ------------------------------------------------------------------------------------------------------


def test_state_dict_holds_values(make_engine: OpenEngine) -> None:
    """state_dict of the model and of a part of it holds values, tied names included; load_state_dict is refused."""
    engine = make_engine(seeded(lambda: Stack(tied=True)), prefetch_bytes=0)
    train(engine, BATCHES[:2])
    found = engine.module.state_dict()
    values = parameters_of(engine)
    assert set(found) == {*values, "head.weight"}
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert torch.equal(found["head.weight"], values["embedding.weight"])
    part = engine.module.blocks[2].state_dict()
    assert torch.equal(part["up.weight"], values["blocks.2.up.weight"])
    with pytest.raises(UsageError, match="load_checkpoint"):
        engine.module.load_state_dict(found)
    assert_nothing_leaked(engine)
    model = engine.module
    engine.close()
    model.load_state_dict({name: value.clone() for name, value in found.items()}, assign=True)
    assert torch.equal(model.blocks[2].up.weight, values["blocks.2.up.weight"])

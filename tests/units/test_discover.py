"""Units are found in any module tree: each parameter is in one, blocks are units, small parts join their parent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from infinity.units.discover import UNIT_SIZE, UnitParameters, discover, modules_to_hook, unit_size_of
from support.models import Block, Linears, Stack, seeded

KB = 1024


def names(units: list[UnitParameters]) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.names for unit in units}


class Nested(nn.Module):
    """Blocks of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(16) for _ in range(2)) for _ in range(3))


class Experts(nn.Module):
    """A block of many experts, larger than a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


class Scaled(nn.Module):
    """Parameters of the root, of a list and of a dict, and a small norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.extra = nn.ParameterList(torch.zeros(2) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.zeros(2)})
        self.blocks = nn.ModuleDict({"one": Block(16), "two": Block(16)})
        self.norm = nn.LayerNorm(4)


def dict_of_blocks() -> nn.Module:
    return nn.ModuleDict({"a": Block(16), "b": Stack(16, 2)})


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 16), *(Block(16) for _ in range(3)), nn.Linear(16, 10))


def shared_twice() -> nn.Module:
    """Two names for one block, and a tied head."""
    model = Stack(16, 3, tied=True)
    model.blocks.append(model.blocks[0])
    return model


def no_parameters() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Flatten())


ZOO: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Stack(16, 3),
    "tied": lambda: Stack(16, 3, tied=True),
    "linears": Linears,
    "nested lists": Nested,
    "experts": lambda: nn.ModuleList(Experts() for _ in range(2)),
    "scaled": Scaled,
    "dict": dict_of_blocks,
    "sequential": sequential,
    "shared": shared_twice,
    "one linear": lambda: nn.Linear(4, 4),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 16, num_layers=2),
    "none": no_parameters,
}


@pytest.mark.parametrize("unit_size", [64, KB, 16 * KB, 64 << 20])
@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_in_one_unit(name: str, unit_size: int) -> None:
    model = ZOO[name]()
    units = discover(model, unit_size)
    found = [id(p) for unit in units for p in unit.parameters]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in model.parameters()}
    listed = dict(model.named_parameters(remove_duplicate=False))
    assert all(listed[n] is p for unit in units for n, p in zip(unit.names, unit.parameters, strict=True))
    assert len({unit.name for unit in units}) == len(units)
    for unit in units:
        assert all(n.startswith(unit.root) for n in unit.names)
        assert len({(p.dtype, p.requires_grad) for p in unit.parameters}) == 1


@pytest.mark.parametrize("unit_size", [64, KB, 16 * KB, 64 << 20])
@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_has_a_module_that_acquires_it(name: str, unit_size: int) -> None:
    """The unit of each module's own parameters is acquired by the module, or by one that contains it."""
    model = ZOO[name]()
    units = discover(model, unit_size)
    unit_of = {id(p): index for index, unit in enumerate(units) for p in unit.parameters}
    hooked = modules_to_hook(model, unit_of, [unit.root for unit in units])
    above: dict[nn.Module, set[nn.Module]] = {}
    for outer in model.modules():
        for inner in outer.modules():
            above.setdefault(inner, set()).add(outer)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            unit = unit_of[id(parameter)]
            assert any(unit in hooked.get(outer, []) for outer in above[module])
    assert all(len(indices) == len(set(indices)) for indices in hooked.values())


def test_blocks_are_units_however_large_a_unit_may_be() -> None:
    units = names(discover(Stack(16, 3), 64 << 20))
    assert [name for name in units if name.startswith("blocks.")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {"embedding.weight", "head.weight"} <= set(units["(root)"])


def test_small_units_split_a_block() -> None:
    units = names(discover(Stack(16, 3), 8500))
    assert units["blocks.0.up"] == ("blocks.0.up.weight", "blocks.0.up.bias")
    assert units["blocks.0"] == ("blocks.0.norm.weight", "blocks.0.norm.bias")  # not worth a transfer of its own


def test_a_layer_larger_than_a_unit_is_one() -> None:
    assert len(discover(nn.Linear(64, 64), 64)) == 1


def test_a_tied_weight_belongs_to_its_first_module_and_both_acquire_it() -> None:
    model = Stack(16, 3, tied=True)
    units = discover(model, 2000)
    assert not any("head.weight" in unit.names for unit in units)
    unit_of = {id(p): index for index, unit in enumerate(units) for p in unit.parameters}
    hooked = modules_to_hook(model, unit_of, [unit.root for unit in units])
    tied = unit_of[id(model.embedding.weight)]
    assert tied in hooked[model.embedding] and tied in hooked[model.head]


def test_frozen_parameters_and_other_dtypes_are_units_of_their_own() -> None:
    model = Stack(16, 1)
    model.blocks[0].up.requires_grad_(False)
    model.blocks[0].down.to(torch.bfloat16)
    units = {unit.name: unit for unit in discover(model, 64 << 20) if unit.root == "blocks.0"}
    assert list(units) == ["blocks.0", "blocks.0 (frozen float32)", "blocks.0 (trainable bfloat16)"]
    assert units["blocks.0 (frozen float32)"].names == ("blocks.0.up.weight", "blocks.0.up.bias")
    assert units["blocks.0 (trainable bfloat16)"].dtype == torch.bfloat16


def test_the_width_in_training_counts() -> None:
    """A subtree that is too large in fp32 may fit in bf16."""
    model = nn.Sequential(sequential())
    size = sum(p.nbytes for p in model.parameters())
    assert len(discover(model, size // 2, width=2)) == 1 < len(discover(model, size // 2))


def test_order_is_that_of_the_model_tree() -> None:
    roots = [unit.root for unit in discover(seeded(Stack), 2000)]
    order = {name: position for position, (name, _) in enumerate(Stack().named_modules())}
    assert [order[root] for root in roots] == sorted(order[root] for root in roots)


@pytest.mark.parametrize(
    ("device_nbytes", "expected"),
    [
        (0, UNIT_SIZE),  # the CPU
        (16 << 30, 201_326_592),  # a block of 12 · 2048² parameters in four bytes
        (2 << 30, 128 << 20),  # a 16th of the device
        (1 << 20, UNIT_SIZE),
    ],
)
def test_automatic_unit_holds_the_largest_repeated_block(device_nbytes: int, expected: int) -> None:
    with torch.device("meta"):
        block = nn.ModuleDict(
            {"in": nn.Linear(2048, 6 * 2048, bias=False), "out": nn.Linear(6 * 2048, 2048, bias=False)}
        )
        model = nn.Sequential(nn.Embedding(100_000, 2048), nn.ModuleList([nn.Linear(2048, 10), block, block]))
    assert unit_size_of("auto", model, 4, device_nbytes) == expected
    assert unit_size_of(1000, model, 4, device_nbytes) == 1000

"""Tiled linear layers: the numbers, state dicts and errors of the layers that they replace."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import ModelError, UsageError
from infinity.nn import TiledLinear, tile
from infinity.nn.pieces import Pieces
from support.models import Stack, seeded

DTYPES = (torch.float32, torch.bfloat16)


def pair(
    inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype = torch.float32, **splits: Any
) -> tuple[nn.Linear, TiledLinear]:
    """Return a layer and its tiled counterpart with the same values."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias, dtype=dtype)
    tiled = TiledLinear(inputs, outputs, bias, dtype=dtype, **splits)
    tiled.load_state_dict(plain.state_dict())
    return plain, tiled


def run(layer: nn.Module, rows: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return output, gradient of the input, and gradients of weight and bias as wholes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs, generator=generator).to(dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    assert x.grad is not None
    wholes: dict[str, torch.Tensor] = {}
    pieces = Pieces(layer)
    for name, parameter in layer.named_parameters():
        piece = pieces.of(name, parameter)
        assert parameter.grad is not None
        wholes.setdefault(piece.name, torch.full(piece.shape, torch.nan, dtype=dtype))[piece.place] = parameter.grad
    return y.detach(), x.grad, *(wholes[name] for name in sorted(wholes))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [{"out_splits": 3}, {"max_bytes": 64 * 2 * 64}, {"out_splits": 1}])
def test_output_tiles_give_the_bits_of_a_linear_layer(splits: dict[str, int], bias: bool, dtype: torch.dtype) -> None:
    """All but the input's gradient, a sum over tiles, whose summands are rounded."""
    plain, tiled = pair(64, 192, bias=bias, dtype=dtype, **splits)
    expected, found = (run(layer, 32, 64, dtype) for layer in (plain, tiled))
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if number == 1 and len(tiled.rows) > 1:
            torch.testing.assert_close(
                other,
                one,
                rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
                atol=4e-2 if dtype == torch.bfloat16 else 1e-6,
            )
        else:
            assert torch.equal(one, other), number


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 19), st.integers(1, 23), st.data(), st.booleans(), st.integers(1, 3))
def test_splits_need_not_divide_the_layer(
    inputs: int, outputs: int, data: st.DataObject, bias: bool, rows: int
) -> None:
    in_splits, out_splits = data.draw(st.integers(1, inputs)), data.draw(st.integers(1, outputs))
    plain, tiled = pair(inputs, outputs, bias=bias, dtype=torch.float64, in_splits=in_splits, out_splits=out_splits)
    assert [len(tiled.columns), len(tiled.rows)] == [in_splits, out_splits]
    assert (sum(tiled.columns), sum(tiled.rows)) == (inputs, outputs)
    for one, other in zip(
        run(plain, rows, inputs, torch.float64), run(tiled, rows, inputs, torch.float64), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 200), st.integers(0, 200_000), st.sampled_from(DTYPES))
def test_tiles_have_at_most_max_bytes(inputs: int, outputs: int, beyond: int, dtype: torch.dtype) -> None:
    """They begin at blocks of 8-bit moments, if a tile has room for a block."""
    limit = inputs * dtype.itemsize + beyond
    layer = TiledLinear(inputs, outputs, max_bytes=limit, dtype=dtype, device="meta")
    assert sum(layer.rows) == outputs and len({*layer.rows[:-1]}) <= 1
    assert all(rows * inputs * dtype.itemsize <= limit for rows in layer.rows)
    if limit >= 256 * inputs * dtype.itemsize:
        assert all(piece.blocks(256) for _, piece in layer.pieces())


def test_initial_values_are_distributed_as_those_of_the_whole_layer() -> None:
    layer = TiledLinear(400, 90, in_splits=4, out_splits=3)
    for name, values in layer.state_dict().items():
        bound = 1 / 400**0.5
        assert 0.95 * bound < values.abs().max() <= bound, name


def test_a_checkpointed_layer_recomputes_its_tiles() -> None:
    _, tiled = pair(8, 12, out_splits=4)
    x = torch.randn(3, 8, requires_grad=True)
    (once,) = torch.autograd.grad(tiled(x).square().sum(), x)
    (again,) = torch.autograd.grad(checkpoint(tiled, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(once, again)


# -- state dicts -------------------------------------------------------------------------------------------------------


def test_state_dicts_are_those_of_the_untiled_model() -> None:
    model, other = seeded(Stack), seeded(Stack, 1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert tile(other, 2000)
    other.load_state_dict(model.state_dict())
    assert list(other.state_dict()) == list(model.state_dict())
    assert tile(model, 5000)
    for each in (model, other):
        for name, value in each.state_dict().items():
            assert torch.equal(value, expected[name]), name
    assert seeded(Stack, 2).load_state_dict(other.state_dict()) == ([], [])


def test_a_loaded_tensor_may_be_assigned() -> None:
    plain, tiled = pair(6, 10, out_splits=3)
    values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    tiled.load_state_dict(values, assign=True)
    assert tiled.tiles[0].weight.data_ptr() == values["weight"].data_ptr()
    assert torch.equal(tiled.state_dict()["weight"], values["weight"])


def test_misfits_are_named_as_in_the_untiled_model() -> None:
    _, tiled = pair(6, 10, out_splits=3)
    before = tiled.state_dict()["bias"].clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: it has shape \[9, 6\].*\[10, 6\]"):
        tiled.load_state_dict({"weight": torch.zeros(9, 6), "bias": before})
    with pytest.raises(RuntimeError, match=r'Missing key.*: "bias"') as error:
        tiled.load_state_dict({"weight": torch.zeros(10, 6)})
    assert "tiles" not in str(error.value)
    missing, unexpected = tiled.load_state_dict({"weight": torch.zeros(10, 6), "other": before}, strict=False)
    assert (missing, unexpected) == (["bias"], ["other"])
    assert torch.equal(tiled.state_dict()["bias"], before)


def test_an_edit_of_a_state_dict_changes_the_layer_or_raises() -> None:
    """Tiles of `tile` are one memory; others are copied, and an edited copy is an error."""
    holder = nn.Sequential(nn.Linear(6, 10))
    assert tile(holder, 100) == ["0"]
    holder.state_dict()["0.weight"].zero_()
    assert not any(tile.weight.any() for tile in holder[0].tiles)

    _, tiled = pair(6, 10, out_splits=3)
    shown = tiled.state_dict()["weight"]
    tiled(torch.randn(2, 6))
    shown.zero_()
    with pytest.raises(UsageError, match=r"weight of the model's state_dict\(\) was edited in place"):
        tiled(torch.randn(2, 6))


def test_parameters_kept_in_a_state_dict_have_gradients() -> None:
    _, tiled = pair(6, 10, out_splits=3)
    tiled.state_dict(keep_vars=True)["weight"].sum().backward()
    assert all(torch.equal(tile.weight.grad, torch.ones_like(tile.weight)) for tile in tiled.tiles)


def test_copies_and_pickles_are_independent() -> None:
    _, tiled = pair(6, 10, out_splits=3)
    states = tiled.state_dict()
    file = io.BytesIO()
    torch.save(tiled, file)
    file.seek(0)
    for other in (copy.deepcopy(tiled), torch.load(file, weights_only=False)):
        assert torch.equal(other.state_dict()["weight"], states["weight"])
        other.tiles[0].weight.data.zero_()
    assert tiled.tiles[0].weight.any()


# -- tile --------------------------------------------------------------------------------------------------------------


def test_large_linear_layers_are_replaced_without_a_copy() -> None:
    model = seeded(Stack)
    weight = model.head.weight
    values, first = weight.detach().clone(), weight.data_ptr()
    changed = tile(model, "4KiB")
    assert changed == [*(f"blocks.{n}.{name}" for n in range(6) for name in ("up", "down")), "head"]
    assert isinstance(model.head, TiledLinear) and model.head.tiles[0].weight.data_ptr() == first
    assert torch.equal(model.state_dict()["head.weight"], values)
    assert weight.numel() == 0, "other holders of the old parameter share no memory"
    assert tile(model, "4KiB") == []


def test_flags_and_attributes_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 16)).eval()
    model[0].weight.requires_grad_(False)
    model[0].bias.no_decay = True  # type: ignore[union-attr]
    tile(model, 128)
    for each in model[0].tiles:
        assert (each.weight.requires_grad, each.bias.requires_grad, each.bias.no_decay) == (False, True, True)
        assert not each.training


def test_a_layer_under_two_names_stays_one_layer() -> None:
    shared = nn.Linear(8, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert tile(model, 128) == ["a"]
    assert model["a"] is model["b"][0]  # type: ignore[index]
    assert {"a.weight", "b.0.weight"} <= set(model.state_dict())


def test_larger_tiles_of_an_earlier_call_are_named_by_their_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4096))
    assert tile(model, "512KiB") == ["1"]
    with caplog.at_level(logging.WARNING, "infinity"):
        assert tile(model, "512KiB") == [] and not caplog.records
        assert tile(model, "256KiB") == []
    (record,) = caplog.records
    assert "tiles of an earlier call stay, though they are larger than max_bytes: 1." in record.getMessage()


def test_larger_parameters_of_other_modules_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "infinity"):
        tile(seeded(Stack), 7000)
    assert "embedding.weight" in caplog.text


class Reading(nn.Module):
    """Reads the weight of its layer instead of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight)


def test_code_that_reads_the_weight_is_refused() -> None:
    model = Reading()
    tile(model, 128)
    with pytest.raises(AttributeError, match="weight of a TiledLinear is in its tiles"):
        model(torch.randn(2, 8))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16))
    model[0].register_forward_hook(lambda *_: None)
    return model


def used() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16))
    model(torch.randn(2, 8)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Stack(depth=0, tied=True), r"embedding.weight and head.weight \(tied weights\)"),
        (lambda: nn.Linear(8, 16), "it is the model itself"),
        (hooked, "it has hooks"),
        (used, "it has a gradient"),
        (lambda: nn.Sequential(nn.Linear(128, 3)), "0 cannot be replaced by tiles: .* row of the weight has 512 bytes"),
    ],
)
def test_a_layer_that_cannot_be_replaced_is_refused(make: Any, text: str) -> None:
    model = make()
    before = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(ModelError, match=text):
        tile(model, 256)
    assert [id(parameter) for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"out_splits": 0}, "out_splits is 0: pass a number from 1 to the 16 features"),
        ({"out_splits": 17}, "out_splits is 17"),
        ({"in_splits": 9}, "in_splits is 9: pass a number from 1 to the 8 features"),
        ({"out_splits": 2.0}, "out_splits is 2.0"),
        ({"in_splits": True}, "in_splits is True"),
        ({"out_splits": 2, "max_bytes": 64}, "both passed"),
        ({"max_bytes": 31}, "one row of the weight has 32 bytes"),
        ({"max_bytes": "many"}, "max_bytes: .*many"),
        ({"max_bytes": -1}, "max_bytes: .*negative"),
    ],
)
def test_bad_splits_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TiledLinear(8, 16, **arguments)


def test_the_names_are_those_of_the_package() -> None:
    assert infinity.nn.TiledLinear is TiledLinear and infinity.nn.tile is tile

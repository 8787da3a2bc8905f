"""Experts of every family of transformers, whole and in tiles: plain PyTorch's training and weights, bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

import infinity
from infinity.checkpoint.export import export
from infinity.checkpoint.pretrained import SavedTensor
from infinity.checkpoint.tensors import WEIGHTS
from infinity.errors import ModelError
from infinity.nn import TiledExperts, tile
from infinity.nn.pieces import Assembly, Pieces
from support.configs import DEVICES, engine_config
from support.experts import plain
from support.loops import open_engine, train
from zoo.families import (
    DENSE,
    FAMILIES,
    ONLY_FP32,
    OTHERS,
    UNMADE,
    WHOLE,
    named,
    nbytes_of,
    tiled,
    with_batches,
    with_experts,
)
from zoo.models import loss_of, seed_all

EVERY = *FAMILIES, *OTHERS, *WHOLE
WAYS = "load_pretrained", "in tiles", "from_pretrained under Init"


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def zero(model: nn.Module) -> None:
    """Set all values that a checkpoint has to zeros."""
    for value in model.state_dict().values():
        value.zero_()


def on_meta(model: nn.Module) -> Any:
    with torch.device("meta"):
        return type(model)(model.config)


@pytest.mark.campaign
def test_every_class_with_experts_is_named() -> None:
    assert {named(family).name for family in EVERY} == with_experts() - {*UNMADE, *DENSE}


@pytest.mark.campaign
@pytest.mark.parametrize("family", WHOLE)
def test_experts_in_other_forms_stay_whole(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = with_batches(family, 1)
    with caplog.at_level(logging.WARNING, "infinity"):
        try:
            tile(model, 5000)
        except ModelError as error:
            assert "share a parameter" in str(error)
        else:
            assert "Larger than max_bytes remain" in caplog.text and ".experts." in caplog.text
    assert not any(isinstance(module, TiledExperts) for module in model.modules())


# -- without an engine -------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, batches: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    seed_all(3)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    found: dict[str, torch.Tensor] = {}
    pieces, whole = Pieces(model), Assembly()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found |= dict(whole.add([pieces.of(name, parameter)], parameter.grad))
    return losses, found


@pytest.mark.campaign(few=2)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_tiles_have_the_gradients_of_the_untiled_model(family: str) -> None:
    whole, batches = with_batches(family, 2)
    (losses, found), (expected, others) = (
        gradients(model, batches) for model in (tiled(whole, nbytes_of(whole, 0.5)), whole)
    )
    assert losses == expected
    assert_equal(found, others)


# -- in an engine ------------------------------------------------------------------------------------------------------


@pytest.mark.campaign(few=3)
@pytest.mark.parametrize(
    ("family", "device"),
    [
        *((family, device) for family in FAMILIES for device in DEVICES),
        *((family, DEVICES[number % 3]) for number, family in enumerate((*OTHERS, *WHOLE))),
    ],
)
def test_training_checkpoints_and_exports_are_those_of_plain_pytorch(family: str, device: str, tmp_path: Path) -> None:
    """Whole and in tiles, saved in the middle, resumed in smaller tiles, exported, and read by transformers and us."""
    model, batches = with_batches(family, 4)
    large, small = (0, 0) if family in WHOLE else (nbytes_of(model, share) for share in (0.5, 0.25))
    config = engine_config(device, device, folder=tmp_path, unit_size=large + 4096, micro=2)
    seed_all(7)
    losses, states = plain(copy.deepcopy(model), batches, config, loss_of)
    for max_bytes in dict.fromkeys((0, large)):
        twin = tiled(model, max_bytes) if max_bytes else copy.deepcopy(model)
        seed_all(7)
        with open_engine(twin, config) as engine:
            assert any(".tiles." in unit.name for unit in engine.units) == (max_bytes > 0)
            found = train(engine, batches[:2], loss_of)
            engine.save_checkpoint(tmp_path / "saved", "middle")
            assert found + train(engine, batches[2:], loss_of) == losses
            assert_equal(engine.state_dict(), states)
    twin = tiled(model, small) if small else copy.deepcopy(model)
    zero(twin)
    with open_engine(twin, config) as engine:
        engine.load_checkpoint(tmp_path / "saved", "middle")
        assert train(engine, batches[2:], loss_of) == losses[2:]
        assert_equal(engine.state_dict(), states)
        engine.save_checkpoint(tmp_path / "saved", "end")
    model.config.save_pretrained(tmp_path / "config")
    exported = export(tmp_path / "saved", tmp_path / "exported", config_from=tmp_path / "config")
    loaded, report = type(model).from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    assert_equal(loaded.state_dict(), states)
    fresh = tiled(on_meta(model), small) if small else on_meta(model)
    assert infinity.load_pretrained(fresh, exported) == ([], [])
    with open_engine(fresh, config) as engine:
        assert_equal(engine.state_dict(), states)


@pytest.mark.campaign(few=2)
@pytest.mark.parametrize("family", [each for each in (*FAMILIES, *OTHERS) if each not in ONLY_FP32])
def test_tiles_train_as_whole_tensors_in_bf16(family: str, tmp_path: Path) -> None:
    model, batches = with_batches(family, 2)
    size, results = nbytes_of(model, 0.5), []
    config = engine_config(bf16=True, folder=tmp_path, unit_size=size + 4096, micro=2)
    for twin in (tiled(model, size), model):
        seed_all(7)
        with open_engine(twin, config) as engine:
            results.append((train(engine, batches, loss_of), engine.state_dict()))
    (losses, states), (expected, others) = results
    assert losses == expected
    assert_equal(states, others)


@pytest.mark.campaign(few=3)
@pytest.mark.parametrize(
    ("family", "way"), [(family, way) for family in EVERY for way in WAYS if way != "in tiles" or family not in WHOLE]
)
def test_weights_are_those_of_the_folder(family: str, way: str, tmp_path: Path) -> None:
    """`save_pretrained` writes a tensor for each expert of most families: none is left at its initial values."""
    source, _ = with_batches(family, 1)
    source.save_pretrained(tmp_path / "folder")
    size = nbytes_of(source, 0.5)
    config = engine_config(unit_size=size + 4096, folder=tmp_path)
    if way == "from_pretrained under Init":
        with infinity.Init(config):
            model = type(source).from_pretrained(tmp_path / "folder")
    else:
        model = tiled(on_meta(source), size) if way == "in tiles" else on_meta(source)
        assert infinity.load_pretrained(model, tmp_path / "folder") == ([], [])
    with open_engine(model, config) as engine:
        assert_equal(engine.state_dict(), source.state_dict())


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_tensors_of_all_experts_are_read_a_tile_at_a_time(
    is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL-MoE's folders have (E, in, out), and transformers' rule transposes them if the model's shape differs."""
    source, _ = with_batches("Qwen3VLMoeForConditionalGeneration", 1)
    source.save_pretrained(tmp_path)
    if is_transposed:
        saved = load_file(tmp_path / WEIGHTS)
        turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in saved.items()}
        save_file(turned, tmp_path / WEIGHTS, {"format": "pt"})
    model = tiled(on_meta(source), nbytes_of(source, 0.25))
    infinity.load_pretrained(model, tmp_path)
    read, largest = SavedTensor.read, max(p.numel() for name, p in model.named_parameters() if ".tiles." in name)

    def checked(self: SavedTensor, start: int, stop: int) -> torch.Tensor:
        assert ".experts." not in self.name or stop - start <= largest
        return read(self, start, stop)

    monkeypatch.setattr(SavedTensor, "read", checked)
    with open_engine(model, engine_config(folder=tmp_path)) as engine:
        assert_equal(engine.state_dict(), source.state_dict())

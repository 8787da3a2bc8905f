"""Checkpoints, exports and pretrained weights of tiled layers are those of the whole layers."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import infinity
from infinity.checkpoint import piecewise
from infinity.checkpoint.export import export
from infinity.checkpoint.format import read_index
from infinity.checkpoint.piecewise import PiecewiseFile
from infinity.checkpoint.tensors import Spec, read_part
from infinity.engine.inference import InferenceEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, ModelError
from infinity.nn import TiledLinear, tile
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Linears, Stack, seeded, token_batches

BATCHES = token_batches(6)


def untiled() -> Stack:
    return Stack(depth=2)


def tiled(max_bytes: int = 4096) -> Stack:
    model = untiled()
    tile(model, max_bytes)
    return model


def columns() -> Stack:
    """Tiles of inputs and outputs, which divide neither."""
    model = untiled()
    for block in model.blocks:
        block.up = TiledLinear(32, 128, in_splits=3, out_splits=5)
    model.head = TiledLinear(32, 61, bias=False, in_splits=5, out_splits=2)
    return model


MAKES = {"whole": untiled, "tiles": tiled, "smaller tiles": lambda: tiled(1500), "columns": columns}


def engine_of(make: Any, seed: int = 0, **options: Any) -> TrainingEngine:
    return open_engine(seeded(make, seed), engine_config(unit_size=2048, **options))


def masters(engine: TrainingEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint of `engine`, by name."""
    saved = engine.save_checkpoint(folder, "compared")
    found = {}
    for file in sorted(saved.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("source", "to"), [*permutations(MAKES, 2)])
def test_a_checkpoint_is_loaded_into_other_tiles(source: str, to: str, bf16: bool, tmp_path: Path) -> None:
    """Masters, moments and step counts are equal bit for bit, and the index is that of the whole layers."""
    with engine_of(MAKES[source], bf16=bf16) as engine:
        train(engine, BATCHES[:2])
        first = masters(engine, tmp_path / "a")
        index = read_index(engine.save_checkpoint(tmp_path / "a"))
    with engine_of(MAKES[to], 7, bf16=bf16) as engine:
        engine.load_checkpoint(tmp_path / "a")
        second = masters(engine, tmp_path / "b")
        other = read_index(tmp_path / "b" / "compared")
        assert train(engine, BATCHES[2:])[-1] > 0
    whole = [name for name, _ in untiled().named_parameters()]
    assert [*index.parameters] == [*other.parameters] == whole
    for name in whole:
        one, two = index.parameters[name], other.parameters[name]
        assert (one.shape, one.step, one.group) == (two.shape, two.step, two.group) and one.step == 2
    assert first.keys() == second.keys() and len(first) == 3 * len(whole)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    with engine_of(tiled, bf16=True) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path, background=True)
        expected = train(engine, BATCHES[3:])
    with engine_of(tiled, 7, bf16=True, param="cpu", optim="none") as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, BATCHES[3:]) == expected


def test_moments_in_8_bits_are_cut_at_their_blocks(tmp_path: Path) -> None:
    def without_bias(max_bytes: int) -> nn.Module:
        model = Stack(depth=1)
        model.blocks[0].up = nn.Linear(32, 128, bias=False)
        model.blocks[0].down = nn.Linear(128, 32, bias=False)
        if max_bytes:
            assert len(tile(model, max_bytes)) == 3
        return model

    results = []
    for size, other_size in ((0, 4096), (4096, 0), (4096, 1500)):
        make, other = (lambda size=each: without_bias(size) for each in (size, other_size))
        with engine_of(make, moments="8bit") as engine:
            train(engine, BATCHES[:2])
            first = masters(engine, tmp_path / "a")
        with engine_of(other, 7, moments="8bit") as engine:
            engine.load_checkpoint(tmp_path / "a")
            second = masters(engine, tmp_path / "b")
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert first["exp_avg_8bit/head.weight"].shape == (61, 32)
        results.append(first)
    assert results[0].keys() == results[1].keys() == results[2].keys()


def test_tiles_that_cut_blocks_of_8_bit_moments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"8bit.*tiles.0.weight, a tile of .*within one of its blocks of 256"):
        engine_of(columns, moments="8bit")
    with engine_of(untiled, moments="8bit") as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path)
    with engine_of(columns, 7) as engine:
        before = engine.state_dict()
        with pytest.raises(CheckpointError, match=r"has 8-bit moments, and .* a tile of .* other tiles"):
            engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.parametrize("make", [tiled, columns])
def test_weights_are_written_whole(make: Any, tmp_path: Path) -> None:
    with engine_of(make) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_16bit_model(tmp_path)
        states = engine.state_dict()
        assert {*states} == {*engine.module.state_dict()}
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    export(tmp_path / "saved", tmp_path / "out")
    plain = untiled()
    infinity.load_pretrained(plain, tmp_path / "out")
    exported = plain.state_dict()
    for name, value in states.items():
        assert torch.equal(saved[name], value) and torch.equal(exported[name], value), name


@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
@pytest.mark.parametrize("late", [False, True], ids=["tiled before", "tiled after"])
@pytest.mark.parametrize("make", [tiled, columns])
def test_pretrained_weights_are_cut(make: Any, late: bool, meta: bool, tmp_path: Path) -> None:
    with engine_of(untiled) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.state_dict()
    export(tmp_path / "saved", tmp_path / "out")
    with torch.device("meta" if meta else "cpu"):
        model = untiled() if late else make()
    infinity.load_pretrained(model, tmp_path / "out")
    if late:
        tile(model, 1500)
    with open_engine(model, engine_config(unit_size=2048)) as engine:
        for name, value in engine.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_misfits_name_the_whole_layer(tmp_path: Path) -> None:
    with engine_of(untiled) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out")

    def other() -> Stack:
        model = tiled()
        model.head = TiledLinear(32, 77, bias=False, out_splits=4)
        return model

    with engine_of(other) as engine, pytest.raises(CheckpointError, match=r"head.weight has shape \[77, 32\]") as error:
        engine.load_checkpoint(tmp_path / "saved")
    assert "tiles" not in str(error.value)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \[77, 32\]") as error:
        infinity.load_pretrained(other(), tmp_path / "out")
    assert "tiles" not in str(error.value) and str(error.value).count("head.weight") == 1


def test_inference_loads_whole_layers(tmp_path: Path) -> None:
    with engine_of(untiled) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = engine.state_dict()
    with InferenceEngine(seeded(tiled, 7), engine_config(unit_size=2048)) as engine:
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())


def test_frozen_tiles_are_saved_whole(tmp_path: Path) -> None:
    def frozen(make: Any) -> nn.Module:
        model: nn.Module = make()
        model.head.requires_grad_(False)
        return model

    for make, other in ((untiled, tiled), (tiled, untiled)):
        with engine_of(lambda make=make: frozen(make), bf16=True) as engine:
            train(engine, BATCHES[:2])
            engine.save_checkpoint(tmp_path)
            expected = engine.state_dict()
            engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
        assert "head.weight" not in torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        with engine_of(lambda other=other: frozen(other), 7, bf16=True) as engine:
            engine.load_checkpoint(tmp_path)
            assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())


def partly_frozen() -> nn.Module:
    model = tiled()
    model.head.tiles[0].requires_grad_(False)
    return model


def test_tiles_that_are_treated_differently_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"head.tiles.0.weight and head.tiles.1.weight are tiles .* one requires_grad"):
        engine_of(partly_frozen)
    model = seeded(tiled)
    first = model.head.tiles[0].weight
    groups = [{"params": [p for p in model.parameters() if p is not first]}, {"params": [first], "lr": 0.1}]
    with pytest.raises(ModelError, match="one param_group"):
        TrainingEngine(model, engine_config(), groups)
    with engine_of(tiled) as engine:
        engine.module.head.tiles[0].requires_grad_(False)
        train(engine, BATCHES[:1])
        with pytest.raises(CheckpointError, match=r"tiles of head.weight had different numbers of updates"):
            engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_layer_under_two_names_is_saved_once(tmp_path: Path) -> None:
    def shared() -> nn.Module:
        model = Linears(64, 3)
        model.layers[2] = model.layers[0]
        tile(model, 4096)
        return model

    batches = [(torch.randn(4, 64), torch.randn(4, 64)) for _ in range(2)]
    with engine_of(shared) as engine:
        train(engine, batches)
        index = read_index(engine.save_checkpoint(tmp_path))
        states = engine.state_dict()
        engine.save_16bit_model(tmp_path, "model.safetensors")
    assert [*index.parameters] == ["layers.0.weight", "layers.1.weight"]
    assert states["layers.0.weight"] is states["layers.2.weight"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as tensors:
        assert {*tensors.keys()} == {*index.parameters}
    model = seeded(shared, 3)
    infinity.load_pretrained(model, tmp_path)
    assert torch.equal(model.state_dict()["layers.2.weight"], states["layers.0.weight"])


# -- files -------------------------------------------------------------------------------------------------------------


def test_memory_of_a_save_holds_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write to the file of a whole layer has at most the bytes of a tile."""
    sizes = []
    real = piecewise.PiecewiseFile.write

    def write(self: PiecewiseFile, name: str, start: int, part: torch.Tensor) -> None:
        if self._path.name.startswith("tiled-"):
            sizes.append(part.nbytes)
        real(self, name, start, part)

    monkeypatch.setattr(piecewise.PiecewiseFile, "write", write)
    with engine_of(lambda: tiled(4096)) as engine:
        engine.save_checkpoint(tmp_path)
    assert sizes and max(sizes) <= 4096


def test_an_incomplete_file_is_an_error(tmp_path: Path) -> None:
    file = PiecewiseFile(tmp_path / "x.safetensors", {"a": Spec(torch.float32, (2, 3))})
    file.write("a", 3, torch.ones(3))
    with pytest.raises(ValueError, match="lacks 12 bytes"):
        file.finish()
    with pytest.raises(TypeError, match=r"a part of a is torch\.bfloat16"):
        file.write("a", 0, torch.ones(3, dtype=torch.bfloat16))
    file.write("a", 0, torch.zeros(3))
    assert file.finish().nbytes == (tmp_path / "x.safetensors").stat().st_size
    with safe_open(tmp_path / "x.safetensors", framework="pt") as tensors:
        assert tensors.get_tensor("a").tolist() == [[0, 0, 0], [1, 1, 1]]


def test_parts_of_a_tile_are_read(tmp_path: Path) -> None:
    whole = torch.arange(42.0).view(6, 7)
    file = PiecewiseFile(tmp_path / "x.safetensors", {"a": Spec(torch.float32, (6, 7))})
    file.write("a", 0, whole)
    file.finish()
    with safe_open(tmp_path / "x.safetensors", framework="pt") as tensors:
        for place in ((slice(1, 4), slice(2, 5)), (slice(2, 6), slice(0, 7))):
            flat = whole[place].reshape(-1)
            for start in range(len(flat)):
                for stop in range(start, len(flat) + 1):
                    assert torch.equal(read_part(tensors, "a", start, stop, place), flat[start:stop])

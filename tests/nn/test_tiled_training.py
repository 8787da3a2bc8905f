"""Tiled layers in an engine: each tile is a unit, and training is that of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import ModelError, OutOfMemoryError, UsageError
from infinity.nn import TiledLinear, tile
from infinity.plan.pools import UNITS, PoolSpec
from support.configs import engine_config
from support.loops import open_engine, plain, train, trained
from support.models import Linears, Stack, seeded, token_batches

BATCHES = token_batches(6)


def tiled_stack(max_bytes: int = 4096) -> Stack:
    model = Stack()
    tile(model, max_bytes)
    return model


class Wide(nn.Module):
    """One layer, in `splits` tiles of 64 × 64, between small ones."""

    def __init__(self, splits: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.wide = TiledLinear(64, 64 * splits, out_splits=splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wide(torch.tanh(self.first(x))).square().mean()
        return out


def unit_pool(engine: TrainingEngine) -> PoolSpec:
    (pool,) = (pool for pool in engine.parts.plan.pools if pool.name == UNITS)
    return pool


@pytest.mark.parametrize("param", ["nvme", "cpu"])
def test_a_layer_larger_than_the_pool_of_units_trains_in_the_memory_of_a_few_tiles(param: str) -> None:
    """Each tile leaves after its use in forward, and is fetched again in backward."""
    pools = []
    for splits in (16, 64):
        with open_engine(seeded(lambda splits=splits: Wide(splits)), engine_config(param, unit_size=16_384)) as engine:
            pool, tiles = unit_pool(engine), [unit for unit in engine.units if ".tiles." in unit.name]
            assert len(tiles) == splits
            assert max(pool.sizes) == max(unit.layout.nbytes for unit in tiles)
            assert pool.nbytes < sum(unit.layout.nbytes for unit in tiles)
            batches = [(torch.randn(4, 8),) for _ in range(4)]
            train(engine, batches[:3])
            before = engine.parts.store.fetches
            train(engine, batches[3:])
            assert engine.parts.store.fetches - before >= 2 * (splits - sum(pool.sizes.values()))
            pools.append(dict(pool.sizes))
    assert pools[0] == pools[1]


def test_a_layer_that_does_not_fit_on_the_device_trains_as_tiles() -> None:
    """The error names the layer and the remedy."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 256), nn.Linear(256, 4096, bias=False))

    config = engine_config(memory={"device": "2MiB"}, micro=2)
    with pytest.raises(
        OutOfMemoryError, match=r"The largest parameter is 1.weight \(4.19 MB\). .* split it with infinity.nn.tile"
    ):
        open_engine(seeded(model), config)
    tiled = seeded(model)
    assert tile(tiled, "64KiB") == ["1"]
    batches = [(torch.randint(16, (2, 3)), torch.randint(4096, (2, 3))) for _ in range(3)]

    def loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    expected = plain(seeded(model), batches, config, loss)
    with open_engine(tiled, config) as engine:
        assert train(engine, batches, loss) == pytest.approx(expected.losses, rel=1e-5)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, expected.parameters[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"accumulation": 2, "update": "after_backward"}], ids=str)
def test_training_is_that_of_a_plain_loop(options: dict[str, Any]) -> None:
    config = engine_config(unit_size=4096, **options)
    found, expected = (loop(seeded(tiled_stack), BATCHES, config) for loop in (trained, plain))
    assert found.units > 50
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=2e-6)


def test_placement_changes_no_bit() -> None:
    """Tiles are units, or part of their block's unit."""
    results = [
        trained(seeded(tiled_stack), BATCHES, engine_config(*where, unit_size=size, bf16=True))
        for where, size in ((("nvme", "nvme"), 4096), (("none", "cpu"), 1 << 20))
    ]
    assert results[0].losses == results[1].losses
    for name, value in results[0].parameters.items():
        assert torch.equal(value, results[1].parameters[name]), name


def test_tiles_of_any_size_are_units() -> None:
    """Far smaller than a unit, they are units if the layer is larger."""
    model = nn.Sequential(TiledLinear(64, 4096, out_splits=512))
    with open_engine(model, engine_config(unit_size=1 << 19)) as engine:
        assert len(engine.units) == 512


def test_a_model_of_an_engine_is_refused() -> None:
    model = seeded(Linears)
    with open_engine(model, engine_config()), pytest.raises(UsageError, match=r"call infinity\.nn\.tile before"):
        tile(model, 1024)


def test_a_state_dict_of_the_engines_model_is_whole_and_read_only() -> None:
    model = seeded(tiled_stack)
    expected = {name: value.clone() for name, value in seeded(Stack).state_dict().items()}
    with open_engine(model, engine_config(unit_size=4096)) as engine:
        shown = model.state_dict()
        assert list(shown) == list(expected)
        for name, value in expected.items():
            assert torch.equal(shown[name], value), name
        shown["head.weight"].zero_()
        with pytest.raises(UsageError, match=r"head.weight of the model's state_dict\(\) was edited"):
            train(engine, BATCHES[:1])


# -- construction ------------------------------------------------------------------------------------------------------


def test_a_model_under_init_is_tiled_with_its_values(tmp_path: Path) -> None:
    """Its layers are in a file of a few units."""
    config = engine_config(unit_size=1024, folder=tmp_path)
    torch.manual_seed(0)
    with infinity.Init(config):
        model = Stack()
        inside = tile(model.blocks, 4096)
    outside = tile(model, 4096)
    assert len(inside) == 12 and outside == ["head"]
    with open_engine(model, config) as engine:
        states, expected = engine.module.state_dict(), seeded(Stack).state_dict()
        assert all(torch.equal(states[name], value) for name, value in expected.items())


def test_tiles_on_the_meta_device_get_initial_values() -> None:
    with torch.device("meta"):
        model = Linears(64, 2, bias=True)
        model.layers.append(TiledLinear(64, 64, in_splits=2, out_splits=2))
        model.layers.append(TiledLinear(64, 64, max_bytes=4096))
    assert tile(model, 4096) == ["layers.0", "layers.1"]
    torch.manual_seed(0)
    with open_engine(model, engine_config(unit_size=4096)) as engine:
        for name, value in engine.module.state_dict().items():
            assert 0.9 / 8 < value.abs().max() <= 1 / 8, name


def test_an_edit_of_a_layer_on_the_meta_device_is_not_lost() -> None:
    with torch.device("meta"):
        model = Linears(64, 2)
    nn.init.zeros_(model.layers[0].weight)
    tile(model, 4096)
    with pytest.raises(ModelError, match=r"layers.0.tiles.0.weight .* was edited 2 times"):
        open_engine(model, engine_config())


def llama_on_meta() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        made: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=False, **sizes))
    return made


def test_a_transformers_model_on_the_meta_device_is_initialised_by_its_own_rule() -> None:
    """Uniform values of nn.Linear would have a deviation of 0.07, those of the model have 0.02."""
    model = llama_on_meta()
    assert "lm_head" in tile(model, 20_000)
    with open_engine(model, engine_config(unit_size=20_000)) as engine:
        for name, value in engine.state_dict().items():
            if "proj" in name or name == "lm_head.weight":
                assert 0.018 < value.std() < 0.022, name


def test_an_edited_layer_of_a_transformers_model_on_the_meta_device_is_refused() -> None:
    for edit in (nn.init.zeros_, lambda weight: weight.mul_(2)):
        model = llama_on_meta()
        with torch.no_grad():
            edit(model.lm_head.weight)
        tile(model, 20_000)
        with pytest.raises(ModelError, match=r"lm_head.tiles.0.weight .* was edited after LlamaForCausalLM"):
            open_engine(model, engine_config())

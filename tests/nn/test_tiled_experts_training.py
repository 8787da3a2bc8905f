"""Tiles of fused experts in an engine: training and checkpoints of the untiled model, reads of needed tiles only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.export import export
from infinity.nn import TiledExperts, tile
from support.configs import engine_config
from support.experts import CHOSEN, MODELS, batches, made, plain, transformers
from support.hugging_face import loss_of
from support.loops import open_engine, train
from support.models import seeded

BATCHES = batches(5, few=True)
LIMIT = 3 * 3 * 32 * 32 * 4


def tiled(name: str = "mixtral", limit: int = LIMIT, seed: int = 0) -> Any:
    model = seeded(MODELS[name], seed)
    assert tile(model, limit)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_training_is_that_of_the_untiled_model(device: str, name: str) -> None:
    """On every tier, bit for bit, with experts that no token reaches."""
    config = engine_config(device, device, unit_size=LIMIT + 4096, micro=2)
    losses, states = plain(seeded(MODELS[name]), BATCHES, config)
    with open_engine(tiled(name), config) as engine:
        assert sum(".tiles." in unit.name for unit in engine.units) >= 6
        assert train(engine, BATCHES, loss_of) == losses
        found = engine.state_dict()
    assert found.keys() == states.keys()
    assert all(torch.equal(found[name], value) for name, value in states.items())


def test_a_block_larger_than_the_buffers_trains_in_the_memory_of_a_few_experts() -> None:
    pools = []
    for limit in (None, LIMIT // 3):
        model = seeded(MODELS["mixtral"])
        if limit is not None:
            tile(model, limit)
        with open_engine(model, engine_config(unit_size=20_000, prefetch_bytes=0, micro=2)) as engine:
            train(engine, BATCHES[:2], loss_of)
            pools.append(sum(pool.nbytes for pool in engine.parts.plan.pools if pool.name == "units"))
    assert pools[1] < pools[0] / 2


def test_checkpoints_and_exports_have_all_experts(tmp_path: Path) -> None:
    """From tiles to other tiles, to none, and to transformers."""
    config = engine_config(unit_size=LIMIT + 4096, micro=2)
    with open_engine(tiled(), config) as engine:
        train(engine, BATCHES[:3], loss_of)
        engine.save_checkpoint(tmp_path / "saved", "one")
        losses, states = train(engine, BATCHES[3:], loss_of), engine.state_dict()
    for model in (tiled(limit=LIMIT // 3, seed=1), seeded(MODELS["mixtral"], 1)):
        with open_engine(model, config) as engine:
            engine.load_checkpoint(tmp_path / "saved", "one")
            assert train(engine, BATCHES[3:], loss_of) == losses
            engine.save_checkpoint(tmp_path / "again", "two")
            assert all(torch.equal(engine.state_dict()[name], value) for name, value in states.items())
    export(tmp_path / "again", tmp_path / "exported")
    made().config.save_pretrained(tmp_path / "exported")
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in states.items())


# -- reads of few experts ----------------------------------------------------------------------------------------------


def inference(model: nn.Module, folder: Path, **options: Any) -> Any:
    return infinity.init_inference(
        model.eval(), engine_config("nvme", "none", folder=folder, unit_size=LIMIT + 4096, **options)
    )


def test_generation_reads_only_the_tiles_of_chosen_experts(tmp_path: Path) -> None:
    """Each token reads at most its experts' tiles of each layer, and writes the text of the plain model."""
    tokens = torch.randint(3, 61, (1, 4))
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = seeded(MODELS["mixtral"]).eval().generate(tokens, **how)  # type: ignore[operator]
    model = tiled(limit=LIMIT // 3)
    called: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, TiledExperts):
            for number, part in enumerate(module.tiles):
                part.register_forward_pre_hook(lambda *_, name=f"{path}.tiles.{number}": called.append(name))
    with inference(model, tmp_path, prefetch_bytes=30_000) as engine:
        apart = {unit.name: unit.layout.nbytes for unit in engine.units if ".tiles." in unit.name}
        assert len(apart) == 16
        others = sum(unit.layout.nbytes for unit in engine.units) - sum(apart.values())
        read, before = [], engine.ledger.snapshot().nvme_bytes_read
        counts: list[int] = []

        def tick(*_: Any) -> None:
            nonlocal before
            now = engine.ledger.snapshot().nvme_bytes_read
            read.append(now - before)
            counts.append(len(called))
            called.clear()
            before = now

        model.register_forward_pre_hook(tick)
        assert torch.equal(engine.generate(tokens, **how), expected)
        tick()
    assert all(count == 2 * CHOSEN for count in counts[2:])
    largest = max(apart.values())
    assert all(each <= 2 * others + (2 * CHOSEN + 4) * largest for each in read[3:]), (read, others, apart)
    assert sum(read[3:]) < 0.7 * len(read[3:]) * sum(apart.values())


def test_a_forward_with_gradients_uses_all_tiles(tmp_path: Path) -> None:
    with inference(tiled(limit=LIMIT // 3), tmp_path) as engine:
        before = engine.ledger.snapshot().fetches
        engine(input_ids=torch.tensor([[5]]))
        assert engine.ledger.snapshot().fetches - before >= 16
        with torch.no_grad():
            before = engine.ledger.snapshot().fetches
            engine(input_ids=torch.tensor([[5]]))
        assert engine.ledger.snapshot().fetches - before < 16


def test_evaluation_between_steps_of_training_changes_nothing() -> None:
    """A forward without gradients chooses its tiles; the trace of training stays."""
    config = engine_config(unit_size=LIMIT + 4096, micro=2)
    losses, _ = plain(seeded(MODELS["mixtral"]), BATCHES, config)
    found = []
    with open_engine(tiled(), config) as engine:
        for batch in BATCHES:
            with torch.no_grad():
                engine(input_ids=batch[0][:1, :2])
            found += train(engine, [batch], loss_of)
    assert found == losses


# -- pretrained weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["load_pretrained", "in tiles", "from_pretrained under Init"])
def test_weights_of_mixtral_are_those_of_the_folder(way: str, tmp_path: Path) -> None:
    """The folder has a tensor for each expert, the model one for all: none is left at its initial values."""
    source: Any = seeded(made, 3)
    source.save_pretrained(tmp_path)
    config = engine_config(unit_size=20_000, folder=tmp_path)
    if way == "from_pretrained under Init":
        with infinity.Init(config):
            model = type(source).from_pretrained(tmp_path)
    else:
        with torch.device("meta"):
            model = type(source)(source.config)
        if way == "in tiles":
            assert tile(model, LIMIT)
        assert infinity.load_pretrained(model, tmp_path) == ([], [])
    with open_engine(model, config) as engine:
        found = engine.state_dict()
    for key, value in source.state_dict().items():
        assert torch.equal(found[key], value), key

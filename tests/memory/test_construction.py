"""Building and loading a model takes the memory of a few units, however many it has.

With everything on nvme, four times the layers (8 to 32: 40 and 158 MB of parameters in fp32) change the peak by less
than a tenth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from infinity.checkpoint.tensors import WEIGHTS_INDEX, Spec, write_tensors
from memory import construction
from support.memory import peak_rss

# They take 10 s each; most of it is the disk's, which others may be using.
pytestmark = [pytest.mark.campaign(few=1), pytest.mark.timeout(600)]

FEW, MANY = 8, 32


def growth(work: Callable[..., None], options: Callable[[int], dict[str, object]]) -> float:
    with ThreadPoolExecutor() as pool:
        few, many = pool.map(lambda layers: peak_rss(work, layers=layers, **options(layers)), (FEW, MANY))
    print(f"peak RSS with {FEW} and {MANY} layers: {few / 1e6:.0f} and {many / 1e6:.0f} MB")
    return many / few - 1


@pytest.mark.parametrize("work", [construction.with_init, construction.from_meta], ids=["init", "meta"])
def test_building_takes_no_more_memory_for_more_layers(work: Callable[..., None], tmp_path: Path) -> None:
    assert growth(work, lambda _: {"folder": str(tmp_path)}) < 0.1


def test_loading_takes_no_more_memory_for_more_layers(tmp_path: Path) -> None:
    assert growth(construction.from_files, lambda layers: written(layers, tmp_path)) < 0.1


@pytest.mark.slow
def test_a_model_built_in_memory_takes_all_of_it(tmp_path: Path) -> None:
    """Memory grows with a model built in memory, so the tests above can fail."""
    assert growth(construction.as_ever, lambda _: {"folder": str(tmp_path)}) > 0.3


def written(layers: int, folder: Path) -> dict[str, object]:
    """Return weights for that many layers, in files of six layers each."""
    weights = folder / f"{layers} layers"
    weights.mkdir()
    model = construction.on_meta(layers)
    specs = {name: Spec(torch.bfloat16, tuple(value.shape)) for name, value in model.state_dict().items()}
    specs.pop("lm_head.weight", None)
    file_of = {name: f"{_layer(name) // 6}.safetensors" for name in specs}
    for file in set(file_of.values()):
        held = {name: spec for name, spec in specs.items() if file_of[name] == file}
        write_tensors(weights / file, held, lambda name: [torch.full(specs[name].shape, 0.5, dtype=torch.bfloat16)])
    (weights / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": file_of}))
    return {"folder": str(folder), "weights": str(weights)}


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "h" else 0

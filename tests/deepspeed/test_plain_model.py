"""A checkpoint's weights in a plain model: shared tensors under all of their names, and the model of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)
from safetensors.torch import load_file
from torch import nn

from infinity.deepspeed.importer.convert import import_deepspeed
from infinity.errors import CheckpointError
from support.models import Block, Stack, seeded, token_batches

Opens = Callable[..., Any]
ALIASES = {
    "head.weight": "embedding.weight",
    "again.weight": "embedding.weight",
    "same.up.weight": "block.up.weight",
    "other": "scale",
    "kept.scale": "scale",
}


class Shared(Stack):
    """A Stack with a weight under three names, a module under two, and a buffer under three, one not persistent."""

    def __init__(self) -> None:
        super().__init__(depth=2, tied=True)
        self.hidden = nn.Module()
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.hidden.register_buffer("scale", self.scale, persistent=False)
        self.register_buffer("other", self.scale)
        self.kept = nn.Module()
        self.kept.register_buffer("scale", self.scale)
        self.again = nn.Linear(32, self.embedding.num_embeddings, bias=False)
        self.again.weight = self.embedding.weight
        self.block = self.same = Block(32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) * self.scale.sum() + self.block(self.embedding(tokens)).mean()


def trained(opens: Opens, stage: int = 3, make: Callable[[], nn.Module] = Shared, **config: Any) -> Any:
    engine = opens(stage, model=seeded(make), **config)
    for batch in token_batches(2):
        engine.backward(engine(*batch))
        engine.step()
    return engine


def places(folder: Path, *, nvme: bool) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"offload_param": place, "offload_optimizer": place} if nvme else {}}


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_name_of_a_shared_tensor_is_in_the_state_dicts(opens: Opens, stage: int, tmp_path: Path) -> None:
    """A strict load into the model takes the results of the functions, of the command, and of the engine."""
    engine = trained(opens, stage)
    engine.save_checkpoint(tmp_path)
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    assert expected.keys() == seeded(Shared).state_dict().keys()
    states = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "bin")
    main([str(tmp_path), str(tmp_path / "safe"), "--safe_serialization"])
    for found in (
        states,
        torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True),
        load_file(tmp_path / "safe" / "model.safetensors"),
        engine.training_engine.state_dict(),
    ):
        assert same(found, expected)
        seeded(Shared, seed=1).load_state_dict(found, strict=True)
    assert states["head.weight"] is states["embedding.weight"]
    engine.load_module_state_dict({"module": expected}, strict=True)


def test_the_index_holds_further_names_only_where_there_are_some(opens: Opens, tmp_path: Path) -> None:
    """Checkpoints of other models stay of version 4, which older versions of Infinity read."""
    trained(opens).save_checkpoint(tmp_path / "shared", tag="a")
    opens(3).save_checkpoint(tmp_path / "plain", tag="a")
    index = json.loads((tmp_path / "shared" / "a" / "checkpoint.json").read_text())
    assert index["version"] == 6 and ALIASES.items() <= index["aliases"].items()
    plain = json.loads((tmp_path / "plain" / "a" / "checkpoint.json").read_text())
    assert plain["version"] == 4 and not {"aliases", "shards"} & plain.keys()


def test_a_shared_tensor_is_loaded_into_an_engine(opens: Opens, tmp_path: Path) -> None:
    engine = trained(opens)
    engine.save_checkpoint(tmp_path)
    other = opens(2, model=seeded(Shared, seed=1))
    other.load_checkpoint(tmp_path)
    assert same(other.module_state_dict(), engine.module_state_dict())


def test_an_imported_checkpoint_has_all_names(tmp_path: Path) -> None:
    """DeepSpeed's shared_params are the index's further names."""
    source = Path(__file__).parents[1] / "integrations" / "deepspeed_checkpoints" / "stage2-tied"
    imported = import_deepspeed(source, tmp_path / "imported")
    expected = load_file(source / "fp32.safetensors")
    found = get_fp32_state_dict_from_zero_checkpoint(imported.parent, imported.name)
    assert same(found, expected)


@pytest.mark.parametrize("nvme", [False, True], ids=["memory", "nvme"])
@pytest.mark.parametrize("ends", [False, True], ids=["open", "destroyed"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_of_an_engine_becomes_a_plain_one(
    opens: Opens, stage: int, ends: bool, nvme: bool, tmp_path: Path
) -> None:
    """With the engine open, which ends, and after `destroy`, which drops values on nvme. Dtypes stay."""
    engine = trained(opens, stage, bf16={"enabled": True}, **(places(tmp_path, nvme=nvme) if stage == 3 else {}))
    engine.save_checkpoint(tmp_path / "saved")
    states = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    if ends:
        engine.destroy()
    model = load_state_dict_from_zero_checkpoint(engine.module, tmp_path / "saved")
    assert model is engine.module and model.head.weight is model.embedding.weight
    rounded = {name: value.bfloat16() for name, value in states.items()}
    buffers = {name: states[name] for name in ("scale", "other", "kept.scale")}
    assert same(model.state_dict(), {**rounded, **buffers})
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    model.float()
    torch.optim.SGD(model.parameters(), lr=0.1)
    model(*token_batches(1)[0]).backward()
    engine.destroy()
    assert model.head.weight.isfinite().all()


def test_a_checkpoint_of_another_model_leaves_the_engine_open(opens: Opens, tmp_path: Path) -> None:
    trained(opens, make=lambda: Stack(depth=2)).save_checkpoint(tmp_path / "smaller")
    trained(opens, make=lambda: Stack(width=64)).save_checkpoint(tmp_path / "wider")
    engine = trained(opens, make=Stack)
    for folder, said in (("smaller", r"blocks\.2\.\S+ is in the model only"), ("wider", "has shape")):
        with pytest.raises(CheckpointError, match=f"of another model: .*{said}"):
            load_state_dict_from_zero_checkpoint(engine.module, tmp_path / folder)
    engine(*token_batches(1)[0])


def test_frozen_parameters_are_those_without_an_optimizer(opens: Opens, tmp_path: Path) -> None:
    """SGD without momentum keeps no moments, and its parameters are trained ones."""
    model = seeded(Stack)
    model.head.requires_grad_(False)
    engine = opens(3, model=model, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine.save_checkpoint(tmp_path)
    states = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert states.keys() == model.state_dict().keys() - {"head.weight"}

"""Export: the model of `from_pretrained` computes as the engine does; a failed export leaves no files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from infinity.checkpoint import tensors
from infinity.checkpoint.export import export
from infinity.checkpoint.tensors import Spec, parts_of, read_part, spec_of, write_tensors
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, OutOfSpaceError, UsageError
from infinity.optim.cpu_adam import split_master
from support import commands
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches
from support.states import states_of


class Normed(nn.Module):
    """Tied and frozen parameters, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.blocks[0][0].weight
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)
        self.frozen_number = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def saved_engine(folder: Path, make: Any = Stack, batches: Any = None, **options: Any) -> TrainingEngine:
    """An open engine, trained and saved."""
    engine = open_engine(seeded(make), engine_config(**options))
    train(engine, batches or token_batches(3))
    engine.save_checkpoint(folder)
    return engine


def test_files_are_what_their_index_says(tmp_path: Path) -> None:
    saved_engine(tmp_path / "saved").close()
    out = export(tmp_path / "saved", tmp_path / "out", max_shard_size="40kB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    held = {file.name: load_file(file) for file in files}
    assert {name: file for file, names in held.items() for name in names} == index["weight_map"]
    assert list(index["weight_map"]) == [name for name, _ in Stack().named_parameters()]
    sizes = {file: sum(value.nbytes for value in values.values()) for file, values in held.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(sizes[file] <= 40_000 or len(held[file]) == 1 for file in held)


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("trained", ["fp32", "bf16"])
def test_every_tensor(tmp_path: Path, trained: str, dtype: str | None) -> None:
    """The export has masters, rounded or cast, and frozen and tied parameters, integers and buffers."""
    make, batches, bf16 = {
        "fp32": (Normed, [(torch.randn(16, 8),) for _ in range(3)], False),
        "bf16": (lambda: Stack(tied=True), None, True),
    }[trained]
    with saved_engine(tmp_path / "saved", make, batches, bf16=bf16) as engine:
        states = states_of(engine)
        expected = dict(engine.stream_state_dict())
        tied = {"last.weight", "head.weight"}
    found = load_file(export(tmp_path / "saved", tmp_path / "out", dtype=dtype) / "model.safetensors")
    assert found.keys() == expected.keys() - tied
    buffers = dict(engine.module.named_buffers())
    for name, value in found.items():
        if dtype is None or name in buffers or not value.is_floating_point():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
            continue
        exact = states.get(f"{name}/master", expected[name]).float()
        right = {"bf16": split_master(exact.contiguous())[0], "fp16": exact.half(), "fp32": exact}[dtype]
        assert value.dtype == right.dtype and torch.equal(value, right), name


def test_a_checkpoint_is_found_by_its_tag_or_as_its_folder(tmp_path: Path) -> None:
    with saved_engine(tmp_path / "saved") as engine:
        train(engine, token_batches(2))
        engine.save_checkpoint(tmp_path / "saved")
    first, also = export(tmp_path / "saved", tmp_path / "1", tag="global_step3"), tmp_path / "a" / "b"
    export(tmp_path / "saved" / "global_step3", also)
    export(tmp_path / "saved", tmp_path / "2")
    content = [(folder / "model.safetensors").read_bytes() for folder in (first, also, tmp_path / "2")]
    assert content[0] == content[1] != content[2]


@pytest.mark.parametrize("what", ["missing", "index", "cut", "gone", "buffers"])
def test_damage_is_an_error_before_anything_is_written(tmp_path: Path, what: str) -> None:
    saved = tmp_path / "saved" / "global_step3"
    if what != "missing":
        saved_engine(tmp_path / "saved").close()
    if what == "index":
        (saved / "checkpoint.json").write_text("{")
    elif what == "cut":
        os.truncate(saved / "unit-00002.safetensors", 100)
    elif what == "gone":
        (saved / "unit-00002.safetensors").unlink()
    elif what == "buffers":
        (saved / "buffers.safetensors").write_bytes(b"\xff" * (saved / "buffers.safetensors").stat().st_size)
    with pytest.raises(CheckpointError):
        export(tmp_path / "saved", tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name != "saved"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    saved_engine(tmp_path / "saved").close()
    calls: list[float] = []

    def fail(done: float, _: str) -> None:
        calls.append(done)
        if len(calls) == 5:
            raise error

    with pytest.raises(type(error)):
        export(tmp_path / "saved", tmp_path / "out", step=fail, max_shard_size="20kB")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(OutOfSpaceError, match="5 are available"):
        export(tmp_path / "saved", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    saved_engine(tmp_path / "saved").close()
    (tmp_path / "out").mkdir()
    export(tmp_path / "saved", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat()
    with pytest.raises(UsageError, match="not an empty folder"):
        export(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    assert (tmp_path / "out" / "model.safetensors").stat() == before


def test_values_that_fp16_does_not_reach(tmp_path: Path) -> None:
    def large() -> Stack:
        model = Stack()
        nn.init.constant_(model.head.weight, 1e5)
        return model

    saved_engine(tmp_path / "saved", large).close()
    with pytest.raises(CheckpointError, match=r"head\.weight has values outside the range of fp16"):
        export(tmp_path / "saved", tmp_path / "out", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_command(tmp_path: Path) -> None:
    saved_engine(tmp_path / "saved").close()
    (tmp_path / "config").mkdir()
    for name in ("config.json", "tokenizer.json", "old.safetensors", "pytorch_model.bin"):
        (tmp_path / "config" / name).write_text("{}")
    result = commands.run(
        "export", tmp_path / "saved", tmp_path / "out", "--dtype", "bf16", "--config-from", tmp_path / "config"
    )
    assert result.exit_code == 0, result.output
    assert re.search(r": 1 file, \d+ kB", result.stdout) and "writing model.safetensors" in result.stderr
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    commands.refused(1, "not an empty folder", "export", tmp_path / "saved", tmp_path / "out")
    commands.refused(1, "its folders 'saved'; pass one", "export", tmp_path, tmp_path / "new")
    commands.refused(1, "absent does not exist: pass the folder", "export", tmp_path / "absent", tmp_path / "new")
    commands.refused(2, "--dtype must be one of", "export", tmp_path / "saved", tmp_path / "new", "--dtype", "int4")
    commands.refused(2, "--max-shard-size", "export", tmp_path / "saved", tmp_path / "new", "--max-shard-size", "0")


@pytest.mark.parametrize("tag", ["", "global_step0"])
def test_the_command_copies_the_config_beside_a_trainers_checkpoint(tag: str, tmp_path: Path) -> None:
    """Without a config.json, from_pretrained would build its class's default model."""
    saved_engine(tmp_path / "checkpoint-5").close()
    (folder,) = (path for path in (tmp_path / "checkpoint-5").iterdir() if path.is_dir())
    folder.rename(folder.with_name("global_step0"))
    (tmp_path / "checkpoint-5" / "latest").write_text("global_step0")
    source = tmp_path / "checkpoint-5" / tag
    for name in ("config.json", "tokenizer.json", "trainer_state.json", "optimizer.pt"):
        (tmp_path / "checkpoint-5" / name).write_text("{}")
    result = commands.run("export", source, tmp_path / "without")  # a folder of no Trainer
    assert result.exit_code == 0 and "lacks a config.json: pass --config-from" in result.stderr
    assert [path.name for path in (tmp_path / "without").iterdir()] == ["model.safetensors"]
    (tmp_path / "checkpoint-5" / "training_args.bin").write_bytes(b"")
    result = commands.run("export", source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "were copied from" in result.stderr
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_folder_that_has_weights_already_is_named(tmp_path: Path) -> None:
    """A Trainer's save_model writes weights or a checkpoint, whichever memory holds."""
    saved_engine(tmp_path / "saved").close()
    out = export(tmp_path / "saved", tmp_path / "out")
    commands.refused(1, "has weights, which from_pretrained reads", "export", out, tmp_path / "again")


CONFIG: dict[str, Any] = {
    "model_type": "both",
    "dtype": "float32",
    "text_config": {"torch_dtype": "float32", "hidden_size": 8},
    "vision": {"model_type": "eye", "dtype": None, "inner_config": {"dtype": {"": "float32"}}},
    "vocabulary_map": {"dtype": "token", "torch_dtype": 5},
    "quantization_config": {"dtype": "int8"},
    "name": "größer",
}


@pytest.mark.parametrize("dtype", [None, "fp16", "fp32"])
def test_config_json_names_the_dtype_of_the_weights(tmp_path: Path, dtype: str | None) -> None:
    """config.json gets the weights' dtype under every existing dtype key, also in nested configs; other keys are
    unchanged.
    """
    saved_engine(tmp_path / "saved", bf16=True).close()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "config" / "other.json").write_text(json.dumps(CONFIG))
    out = export(tmp_path / "saved", tmp_path / "out", dtype=dtype, config_from=tmp_path / "config")
    name = {None: "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    expected = json.loads(json.dumps(CONFIG))
    expected["dtype"] = expected["text_config"]["torch_dtype"] = name
    expected["vision"]["dtype"] = expected["vision"]["inner_config"]["dtype"] = name
    assert json.loads((out / "config.json").read_text()) == expected
    assert json.loads((out / "other.json").read_text()) == CONFIG


def test_weights_of_two_dtypes_beside_a_config_that_names_one(tmp_path: Path) -> None:
    def mixed() -> nn.Module:
        model = nn.ModuleDict({"body": Stack(), "frozen": nn.Linear(2, 2).double().requires_grad_(False)})
        model.forward = lambda *batch: model["body"](*batch)  # type: ignore[method-assign]
        return model

    saved_engine(tmp_path / "saved", mixed).close()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    said = r"several dtypes \(body\.embedding\.weight is float32, frozen\.weight is float64\)"
    with pytest.raises(UsageError, match=said):
        export(tmp_path / "saved", tmp_path / "out", config_from=tmp_path / "config")
    (tmp_path / "config" / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="holds no JSON object"):
        export(tmp_path / "saved", tmp_path / "out", dtype="fp32", config_from=tmp_path / "config")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "saved"]
    (tmp_path / "config" / "config.json").write_text("{}")
    out = export(tmp_path / "saved", tmp_path / "out", dtype="fp32", config_from=tmp_path / "config")
    assert json.loads((out / "config.json").read_text()) == {"dtype": "float32"}


# -- files in parts ----------------------------------------------------------------------------------------------------


def test_tensors_are_written_and_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of every dtype, shape and order; safetensors reads the written file."""
    given = {
        "code": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, 5).half(),
        "whole": torch.randn(5, 3, 7),
        "flag": torch.tensor([True, False, True]),
    }
    monkeypatch.setattr(tensors, "PART", 10)
    specs = {name: Spec(value.dtype, tuple(value.shape)) for name, value in given.items()}
    write_tensors(
        tmp_path / "all", specs, lambda name: given[name].view(-1).split(4) or [given[name]], {"format": "pt"}
    )
    found = load_file(tmp_path / "all")
    assert all(torch.equal(found[name], value) for name, value in given.items()) and found.keys() == given.keys()
    with safe_open(tmp_path / "all", framework="pt") as file:
        assert {name: spec_of(file, name) for name in given} == specs
        for name, value in given.items():
            assert torch.equal(torch.cat([value.view(-1)[:0], *parts_of(file, name)]), value.view(-1)), name
        for start in range(0, 105, 8):
            for stop in range(start, 105, 13):
                assert torch.equal(read_part(file, "whole", start, stop), given["whole"].view(-1)[start:stop])
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "all", {}, lambda name: [])
    with pytest.raises(ValueError, match="has 8 bytes, expected"):
        write_tensors(tmp_path / "short", {"a": Spec(torch.float32, (3,))}, lambda name: [torch.zeros(2)])

"""Bad values of model, model_parameters or config raise one error at start that names them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import ConfigError, ModelError
from infinity.tiers.device import CpuDevice
from support.configs import raw
from support.models import Block, Stack, seeded

CPU: dict[str, Any] = {"device": CpuDevice()}
BEGIN = pytest.mark.parametrize("begin", [infinity.initialize, infinity.init_inference])


def lazy(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Block(8), nn.Sequential(kind()))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (lambda: "gpt2", r"model is the string 'gpt2': pass a torch\.nn\.Module"),
    "nothing": (lambda: None, "model is None"),
    "a class": (lambda: Stack, r"model is the class Stack: pass an instance of it, Stack\("),
    "a function": (lambda: seeded, r"model is a builtins\.function"),
    "parameters": (lambda: list(Stack().parameters()), r"model is a builtins\.list"),
    "scripted": (lambda: torch.jit.script(Block(8)), "the model is a RecursiveScriptModule: TorchScript"),
    "traced": (lambda: torch.jit.trace(Block(8), torch.ones(2, 8)), "the model is a TopLevelTracedModule"),
    "scripted in part": (
        lambda: nn.Sequential(Block(8), torch.jit.script(Block(8))),
        "module 1 is a RecursiveScriptModule",
    ),
    "data parallel": (lambda: nn.DataParallel(Block(8)), r"the model is a DataParallel: .*\(\.module\)"),
    "lazy": (lambda: lazy(lambda: nn.LazyLinear(8)), r"parameter 1\.0\.weight of a LazyLinear has no shape.*run one"),
    "lazy buffers": (
        lambda: lazy(lambda: nn.LazyBatchNorm1d(affine=False)),
        r"buffer 1\.0\.running_mean of a LazyBatchNorm1d",
    ),
}


@BEGIN
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_model(name: str, begin: Any, tmp_path: Path) -> None:
    make, said = MODELS[name]
    with pytest.raises(ModelError, match=said):
        begin(make(), raw(tmp_path), **CPU)


def test_a_lazy_model_that_ran_once(tmp_path: Path) -> None:
    model = lazy(lambda: nn.LazyLinear(8))
    model(torch.ones(2, 8))
    infinity.initialize(model, raw(tmp_path), **CPU)[0].close()


@BEGIN
def test_an_engine_as_model(begin: Any, tmp_path: Path) -> None:
    said = r"model is already an engine, and infinity\.init.* takes an nn\.Module"
    with infinity.initialize(seeded(Stack), raw(tmp_path), **CPU)[0] as engine, pytest.raises(ModelError, match=said):
        begin(engine, raw(tmp_path), **CPU)
    with infinity.init_inference(seeded(Stack), raw(tmp_path), **CPU) as engine, pytest.raises(ModelError, match=said):
        begin(engine, raw(tmp_path), **CPU)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Block(8))


def ddp_in_a_part() -> nn.Module:
    return nn.Sequential(Block(8), nn.parallel.DistributedDataParallel(Block(8)))


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = fully_shard(Block(8), mesh=init_device_mesh("cpu", (1,)))
    return model


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    model: nn.Module = replicate(Block(8))
    return model


@BEGIN
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (ddp, r"the model is a DistributedDataParallel: An engine reduces gradients .*\(\.module\)"),
        (ddp_in_a_part, "module 1 is a DistributedDataParallel"),
        (fsdp2, r"the model is a FSDPBlock: .*without FullyShardedDataParallel or fully_shard"),
        (replicated, r"the model is a \w*Block: .*without replicate\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_that_is_parallel_already(
    make: Callable[[], nn.Module], said: str, begin: Any, one_rank: None, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        begin(make(), raw(tmp_path), **CPU)


# -- model_parameters --------------------------------------------------------------------------------------------------


def spent(model: nn.Module) -> Iterator[nn.Parameter]:
    parameters = model.parameters()
    list(parameters)
    return parameters


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), r"is an optimizer \(AdamW\): .*model\.parameters\(\)"),
        (spent, "model_parameters is empty: a generator"),
        (lambda model: [], "model_parameters is empty"),
        (lambda model: [{"params": model.head.parameters()}, {"params": spent(model)}], r"\[1\] has no params"),
        (lambda model: model, "model_parameters is a Stack: pass model.parameters"),
        (lambda model: {"params": model.parameters()}, "model_parameters is one group: pass a list"),
        (lambda model: 3, "model_parameters is a int"),
    ],
)
def test_what_are_no_parameters(give: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    model = seeded(Stack)
    with pytest.raises(ConfigError, match=said):
        infinity.initialize(model, raw(tmp_path), give(model), **CPU)


# -- the config --------------------------------------------------------------------------------------------------------

YAML = "# of a run\ntrain_micro_batch_size_per_gpu: 4\nzero_optimization:\n  stage: 3\n"


@BEGIN
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("engine.yaml", YAML, r"engine\.yaml: is YAML, and a configuration is JSON: pass yaml\.safe_load"),
        ("engine.yml", "- 3", r"engine\.yml: is YAML"),
        ("engine.json", YAML, r"engine\.json: is YAML"),
        ("engine.json", '{"a": }', r"engine\.json, line 1, column 7: is not JSON"),
        ("engine.toml", "[a]\nb = 1\n", r"engine\.toml, line 1, column 2: is not JSON"),
        ("engine.json", "", r"engine\.json, line 1, column 1: is not JSON"),
    ],
)
def test_a_file_that_is_not_json(begin: Any, name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        begin(seeded(Stack), tmp_path / name, **CPU)


@BEGIN
def test_json_by_another_name(begin: Any, tmp_path: Path) -> None:
    """JSON in a file with the suffix .yaml is read as JSON."""
    path = tmp_path / "engine.yaml"
    path.write_text(json.dumps(raw(tmp_path)))
    made = begin(seeded(Stack), path, **CPU)
    (made[0] if isinstance(made, tuple) else made).close()


@BEGIN
def test_what_is_no_path_of_a_file(begin: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder: pass the path of the JSON file in it"):
        begin(seeded(Stack), tmp_path, **CPU)
    with pytest.raises(ConfigError, match=r"not a string of JSON: pass json\.loads"):
        begin(seeded(Stack), json.dumps(raw(tmp_path)), **CPU)

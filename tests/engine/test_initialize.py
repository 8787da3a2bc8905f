"""`infinity.initialize`: arguments, return values, and models built on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import infinity
from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, ModelError
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.tiers.device import CpuDevice
from infinity.units.released import is_released
from support.configs import PLACEMENTS, engine_config
from support.loops import parameters_of, train
from support.models import VOCABULARY, Stack, seeded, token_batches

CPU: dict[str, Any] = {"device": CpuDevice()}


def raw_config(folder: Path, **top: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"unit_size": 100_000, "debug": True},
        **top,
    }


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`count` samples; the first token of each is its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.full((8,), number % VOCABULARY)
        return tokens, tokens


# -- what it takes and returns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dict", "path", "string", "config"])
def test_config_in_every_form(kind: str, tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(raw))
    given = {"dict": raw, "path": path, "string": str(path), "config": Config.load(raw)}[kind]
    engine, optimizer, loader, scheduler = infinity.initialize(model=seeded(Stack), config=given, **CPU)
    with engine:
        assert isinstance(engine, TrainingEngine)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer is engine.optimizer
        assert loader is None
        assert scheduler is None
        assert train(engine, token_batches(2))[0] > 0


def test_scheduler(tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    engine, optimizer, _, scheduler = infinity.initialize(
        model=seeded(Stack), config=raw_config(tmp_path, scheduler=schedule), **CPU
    )
    with engine:
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
        seen = []
        for batch in token_batches(4):
            seen.append(optimizer.param_groups[0]["lr"])
            train(engine, [batch])
        assert seen == pytest.approx([0, 5e-4, 1e-3, 1e-3])


def test_dataloader(tmp_path: Path) -> None:
    """The loader returns trainable micro-batches; an epoch has every sample at most once, in an order of its own."""
    engine, _, loader, _ = infinity.initialize(
        model=seeded(Stack), config=raw_config(tmp_path), training_data=Tokens(18), **CPU
    )
    with engine:
        assert loader is not None
        assert len(loader) == 4
        epochs = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            batches = [(tokens, targets) for tokens, targets in loader]
            assert all(tokens.shape == (4, 8) for tokens, _ in batches)
            train(engine, batches)
            epochs.append([int(number) for tokens, _ in batches for number in tokens[:, 0]])
        assert len(set(epochs[0])) == 16
        assert epochs[0] != epochs[1]
        assert engine.global_steps == 8


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)


@pytest.mark.parametrize(("data", "said"), [(Tokens(3), "3 samples, too few"), (Endless(), "has no length")])
def test_data_that_gives_no_batch(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        infinity.initialize(model=seeded(Stack), config=raw_config(tmp_path), training_data=data, **CPU)


def forms(model: nn.Module) -> dict[str, Any]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return {
        "generator": model.parameters(),
        "list": list(model.parameters()),
        "named": model.named_parameters(),
        "groups": [{"params": weights}, {"params": rest}],
        "groups of generators": [{"params": iter(weights)}, {"params": iter(rest)}],
        "named groups": [{"params": list(model.named_parameters())}],
    }


@pytest.mark.parametrize("form", forms(nn.Linear(1, 1)))
def test_model_parameters_in_every_form(form: str, tmp_path: Path) -> None:
    """All forms of model_parameters train the same."""
    batches = token_batches(3)
    with infinity.initialize(model=seeded(Stack), config=raw_config(tmp_path), **CPU)[0] as engine:
        expected = train(engine, batches)
    model = seeded(Stack)
    engine, optimizer, _, _ = infinity.initialize(
        model=model, config=raw_config(tmp_path), model_parameters=forms(model)[form], **CPU
    )
    with engine:
        assert train(engine, batches) == expected
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in listed} == {id(p) for p in model.parameters()}


def test_parameters_that_are_not_the_models(tmp_path: Path) -> None:
    model = seeded(Stack)
    weight = next(model.parameters())
    for given, said in (
        (seeded(Stack).parameters(), "not the model's"),
        ([weight, weight], "twice"),
        ([{"params": [weight]}, {"params": [weight]}], "twice"),
        ([], "model_parameters is empty"),
        ([{"lr": 1.0}], "no trainable parameters"),
        (["embedding.weight"], "holds a str"),
        ([{"params": [1.0]}], "holds a float"),
        (weight, "holds a Tensor"),
    ):
        with pytest.raises((ConfigError, ModelError), match=said):
            infinity.initialize(model=model, config=raw_config(tmp_path), model_parameters=given, **CPU)  # type: ignore[arg-type]


# -- models on the meta device -----------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    return GPT2(GPT2Config(VOCABULARY, seq_length=8, num_layers=3, hidden_size=32, num_attention_heads=2))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()  # type: ignore[no-any-return]


def values_of(make: Any, config: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the initial values of a model built on the meta device."""
    model = on_meta(make)
    torch.manual_seed(seed)
    with TrainingEngine(model, config, device=CpuDevice()) as engine:
        return parameters_of(engine)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_meta_values_follow_from_the_seed_alone(tmp_path: Path) -> None:
    """Initial values do not depend on tiers and units."""
    reference = values_of(gpt2, engine_config(folder=tmp_path))
    for param, optim in PLACEMENTS:
        assert same(values_of(gpt2, engine_config(param, optim, folder=tmp_path)), reference)
    for unit_size in (2048, 20_000, "64MiB"):
        assert same(values_of(gpt2, engine_config(folder=tmp_path, unit_size=unit_size)), reference)
    assert not same(values_of(gpt2, engine_config(folder=tmp_path), seed=1), reference)


def test_meta_values_are_distributed_as_on_the_cpu(tmp_path: Path) -> None:
    built = seeded(gpt2)
    for name, value in values_of(gpt2, engine_config(folder=tmp_path)).items():
        expected = built.get_parameter(name).detach()
        assert value.shape == expected.shape
        assert float(value.mean()) == pytest.approx(float(expected.mean()), abs=0.01)
        assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.25, abs=1e-6)


def test_no_two_modules_draw_the_same_values(tmp_path: Path) -> None:
    values = values_of(gpt2, engine_config(folder=tmp_path))
    first, second = values["h.0.mlp.c_fc.weight"], values["h.1.mlp.c_fc.weight"]
    assert not torch.isclose(first, second).any(dim=1).all()


def test_construction_does_not_disturb_the_generator_by_the_size_of_the_model(tmp_path: Path) -> None:
    """Construction draws one number for any model, so that data drawn afterwards are the same."""
    after = []
    for layers in (1, 3):
        model = on_meta(lambda n=layers: GPT2(GPT2Config(VOCABULARY, 8, n, 32, 2)))
        torch.manual_seed(0)
        with TrainingEngine(model, engine_config(folder=tmp_path), device=CpuDevice()):
            after.append(torch.rand(3).tolist())
    assert after[0] == after[1]


def test_a_model_on_meta_trains_as_its_values_on_the_cpu(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, bf16=True)
    batches = token_batches(4)
    values = values_of(gpt2, engine_config(folder=tmp_path))
    twin = gpt2()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(values[name])
    with TrainingEngine(twin, config, device=CpuDevice()) as engine:
        expected = train(engine, batches)
    model = on_meta(gpt2)
    torch.manual_seed(0)
    with TrainingEngine(model, config, device=CpuDevice()) as engine:
        assert train(engine, batches) == expected


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """Scripts may set a default device for the whole program, or for a block that builds and initialises."""
    config, batches = engine_config(folder=tmp_path), token_batches(3)
    losses = []
    for around in (nullcontext(), torch.device("meta")):
        torch.manual_seed(0)
        with around:
            model = on_meta(gpt2)
            engine, *_ = infinity.initialize(model=model, config=config, device=CpuDevice())
        with engine:
            losses.append(train(engine, batches))
    assert losses[0] == losses[1]


class Decoder(nn.Module):
    """A model whose head shares its weight with the embedding, has its own bias, and is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.body:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_a_shared_parameter_that_is_in_its_tier_already(tmp_path: Path) -> None:
    """The second module is initialised later: its bias gets values, and the shared weight keeps its own."""
    values = values_of(Decoder, engine_config(folder=tmp_path, unit_size=100))
    assert values.keys() == {
        "embedding.weight",
        "head.bias",
        *(f"body.{n}.{p}" for n in (0, 1) for p in ("weight", "bias")),
    }
    assert all(torch.isfinite(value).all() for value in values.values())
    assert float(values["embedding.weight"].std()) == pytest.approx(1.0, rel=0.1)
    assert 0 < float(values["head.bias"].abs().max()) <= 32**-0.5


class Counting(GPT2):
    """Records how many elements of its parameters are in memory while it is initialised."""

    most = 0

    def initialize_module(self, module: nn.Module) -> None:
        super().initialize_module(module)
        real = [p.numel() for p in self.parameters() if not is_released(p) and not p.is_meta]
        self.most = max(self.most, sum(real))


def test_construction_takes_no_more_memory_than_a_unit(tmp_path: Path) -> None:
    """Construction of a model of many equal blocks holds one block in memory at a time."""
    model = on_meta(lambda: Counting(GPT2Config(VOCABULARY, 8, num_layers=16, hidden_size=32, num_attention_heads=2)))
    block = sum(p.numel() for p in model.get_submodule("h.0").parameters())
    with TrainingEngine(model, engine_config(folder=tmp_path), device=CpuDevice()):
        pass
    assert model.most == block


class Nameless(nn.Module):
    """Holds a parameter without an initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_be_initialised(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"1 \(Nameless\) was built on the meta device and has no reset_parameters"):
        TrainingEngine(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Nameless())), engine_config(folder=tmp_path))


class Masked(nn.Linear):
    """Computes a buffer only in its constructor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)


def test_a_buffer_on_meta(tmp_path: Path) -> None:
    """A module may fill the buffer when it is initialised; otherwise its value is unknown, an error."""
    with TrainingEngine(
        on_meta(lambda: nn.BatchNorm1d(3)), engine_config(folder=tmp_path), device=CpuDevice()
    ) as engine:
        found = dict(engine.module.named_buffers())
    expected = dict(nn.BatchNorm1d(3).named_buffers())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(ModelError, match="buffer mask is on the meta device"):
        TrainingEngine(on_meta(Masked), engine_config(folder=tmp_path))

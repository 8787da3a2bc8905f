"""Training with saved activations in another tier gives the bits of training without."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, LifetimeError
from infinity.sim.gpt2 import GPT2, GPT2Config
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.late_room import use_late_rooms
from support.loops import assert_same, open_engine, train, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = token_batches(4, batch=4, length=16)
NVME = {"device": "nvme", "min_bytes": 512, "memory_bytes": 32768}
CPU = {**NVME, "device": "cpu"}
Make = Callable[[], nn.Module]


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def non_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def dropped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(block(x), 0.3)


def on_cpu(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        out: torch.Tensor = block(x)
    return out


def gpt2(*, checkpointed: bool = False) -> GPT2:
    return GPT2(GPT2Config(64, seq_length=16, num_layers=4, hidden_size=32, num_attention_heads=4,
                           checkpoint_activations=checkpointed))  # fmt: skip


MODELS: dict[str, Make] = {
    "plain": lambda: Stack(32),
    "tied": lambda: Stack(32, tied=True),
    "dropout": lambda: Stack(32, run=dropped),
    "reentrant": lambda: Stack(32, run=reentrant),
    "non-reentrant": lambda: Stack(32, run=non_reentrant),
    "save_on_cpu": lambda: Stack(32, run=on_cpu),
    "gpt2": gpt2,
    "gpt2 checkpointed": lambda: gpt2(checkpointed=True),
}


def moved(engine: TrainingEngine) -> tuple[int, int]:
    now = engine.ledger.snapshot()
    return now.activation_bytes_written, now.activation_bytes_read


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    use_late_disks(monkeypatch)
    use_late_rooms(monkeypatch)


@pytest.mark.parametrize("model", MODELS)
def test_models_train_to_the_same_bits(model: str, late: None) -> None:
    make = MODELS[model]
    torch.manual_seed(5)
    expected = trained(seeded(make), BATCHES, engine_config())
    torch.manual_seed(5)
    with open_engine(seeded(make), engine_config(activations=NVME)) as engine:
        losses = train(engine, BATCHES)
        written, read = moved(engine)
        assert losses == expected.losses
        assert (written > 50_000 and read > 0) or model in ("save_on_cpu", "non-reentrant")
    torch.manual_seed(5)
    assert_same(trained(seeded(make), BATCHES, engine_config(activations=NVME)), expected)


@pytest.mark.parametrize("section", [NVME, CPU], ids=["nvme", "cpu"])
@pytest.mark.parametrize("run", [None, reentrant], ids=["plain", "reentrant"])
def test_a_device_with_memory_of_its_own_trains_to_the_same_bits(section: Any, run: Any, late: None) -> None:
    def make() -> Stack:
        return Stack(32, run=run)

    expected = trained(seeded(make), BATCHES, engine_config())
    with open_engine(seeded(make), engine_config(activations=section), LateDevice()) as engine:
        assert train(engine, BATCHES) == expected.losses
        written, read = moved(engine)
        assert written > 50_000 and 0 < read <= written


@pytest.mark.parametrize(
    "options", [{"accumulation": 2, "clip": 0.5}, {"bf16": True}, {"fp16": {"initial_scale_power": 8}}], ids=str
)
def test_schedules_and_precisions_keep_their_bits(options: dict[str, Any], late: None) -> None:
    make = MODELS["plain"]
    expected = trained(seeded(make), BATCHES, engine_config(**options))
    assert_same(trained(seeded(make), BATCHES, engine_config(activations=NVME, **options)), expected)


def test_autocast_keeps_its_bits(late: None) -> None:
    def in_bf16(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(*batch)
        return loss

    expected = trained(seeded(MODELS["plain"]), BATCHES, engine_config(), loss_of=in_bf16)
    config = engine_config(activations=NVME)
    assert_same(trained(seeded(MODELS["plain"]), BATCHES, config, loss_of=in_bf16), expected)


@pytest.mark.slow
def test_a_compiled_model_trains_to_its_own_bits(late: None) -> None:
    def losses(**options: Any) -> list[float]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(seeded(MODELS["plain"]), backend="aot_eager")
        with open_engine(compiled, engine_config(**options)) as engine:
            found = train(engine, BATCHES)
            assert not options or moved(engine)[1] > 0
        return found

    assert losses(activations=NVME) == losses()


# -- graphs ----------------------------------------------------------------------------------------------------------


def linears(**options: Any) -> TrainingEngine:
    """An engine whose updates wait for `step`, so that a graph can be used several times."""
    config = engine_config(update="next_forward", activations={**NVME, **options})
    return open_engine(seeded(lambda: Linears(32, 12)), config)


VECTORS = vector_batches(3, batch=64)


def gradients(engine: TrainingEngine, x: torch.Tensor, targets: torch.Tensor, times: int, **options: Any) -> Any:
    x = x.clone().requires_grad_()
    loss = engine(x, targets)
    return [torch.autograd.grad(loss, x, retain_graph=True, **options)[0] for _ in range(times)]


def test_a_retained_graph_gives_the_same_gradient_again(late: None) -> None:
    with linears() as engine:
        one, two, three = gradients(engine, *VECTORS[0], times=3)
        assert torch.equal(one, two) and torch.equal(one, three)
        written, read = moved(engine)
        assert read > written


def test_a_second_derivative_is_that_of_plain_torch(late: None) -> None:
    def second(model: Any) -> torch.Tensor:
        x = VECTORS[0][0].clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x, VECTORS[0][1]), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second(seeded(lambda: Linears(32, 12)))
    with linears() as engine:
        assert torch.equal(second(engine), expected)


def test_several_forwards_before_their_backwards_in_any_order(late: None) -> None:
    def losses(model: Any, order: tuple[int, ...]) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x, _ in VECTORS]
        found = [model(x, targets) for x, (_, targets) in zip(inputs, VECTORS, strict=True)]
        return [torch.autograd.grad(found[number], inputs[number])[0] for number in order]

    for order in ((0, 1, 2), (2, 0, 1)):
        expected = losses(seeded(lambda: Linears(32, 12)), order)
        with linears() as engine:
            for one, other in zip(losses(engine, order), expected, strict=True):
                assert torch.equal(one, other)


def test_evaluation_saves_nothing() -> None:
    with linears() as engine, torch.no_grad():
        engine(*VECTORS[0])
        assert moved(engine) == (0, 0) and len(engine.parts.activations._all) == 0


def test_an_edit_in_place_in_the_forward_is_an_error() -> None:
    class Edits(Linears):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = first = torch.tanh(self.layers[0](x))
            for layer in self.layers[1:]:
                x = torch.tanh(layer(x))
            first.add_(1)
            return F.mse_loss(x, targets)

    with open_engine(Edits(32, 12), engine_config(activations=NVME)) as engine:
        loss = engine(*VECTORS[0])
        with pytest.raises(LifetimeError, match="modified by an inplace operation"):
            engine.backward(loss)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_frees_everything_and_training_continues(where: str, late: None) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    failing = False

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if failing and where == "forward":
            raise ValueError("on purpose")
        return Raises.apply(block(x)) if failing else block(x)  # type: ignore[no-any-return]

    def fail_once(engine: TrainingEngine) -> None:
        nonlocal failing
        failing = True
        with pytest.raises(ValueError, match="on purpose"):
            engine.backward(engine(*BATCHES[0]))
        failing = False

    options = {"update": "next_forward"}
    model = seeded(lambda: Stack(32, run=run))
    expected = trained(model, BATCHES, engine_config(**options))
    with open_engine(seeded(lambda: Stack(32, run=run)), engine_config(activations=NVME, **options)) as engine:
        first = train(engine, BATCHES[:2])
        fail_once(engine)
        gc.collect()
        assert len(engine.parts.activations._all) == 0
        assert first + train(engine, BATCHES[2:]) == expected.losses


def test_nothing_is_left_on_disk_or_open(tmp_path: Path) -> None:
    folder = tmp_path / "activations"
    folder.mkdir()
    trained(seeded(MODELS["plain"]), BATCHES[:1], engine_config())  # opens what stays open
    before = len(os.listdir("/proc/self/fd"))
    section = {**NVME, "nvme_path": str(folder)}
    trained(seeded(MODELS["plain"]), BATCHES, engine_config("cpu", "cpu", activations=section))
    assert len(os.listdir("/proc/self/fd")) == before and list(folder.iterdir()) == []


# -- plan and config -------------------------------------------------------------------------------------------------


def test_buffers_are_planned_and_room_is_counted() -> None:
    with open_engine(seeded(MODELS["plain"]), engine_config(activations=NVME)) as engine:
        plan = engine.parts.plan
        at_start = engine.parts.tier_bytes()
        assert at_start == plan.peak_nbytes()
        assert "tensors saved for backward, from 512 B: on nvme" in engine.describe()
        train(engine, BATCHES[:1])
        room = engine.parts.activations.room.nbytes
        assert room > 0 and engine.parts.tier_bytes()["nvme"] == at_start["nvme"] + room


def test_the_host_tier_has_no_effect_where_the_host_computes() -> None:
    with open_engine(seeded(MODELS["plain"]), engine_config(activations=CPU)) as engine:
        assert engine.parts.plan.activations is None and engine.parts.activations is None


def test_nvme_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"infinity\.activations\.nvme_path"):
        engine_config("cpu", "cpu", activations=NVME)


def test_deepspeeds_section_maps_to_activations() -> None:
    from infinity.config import Config

    section = {"cpu_checkpointing": True, "partition_activations": True, "number_checkpoints": None, "profile": False}
    config = Config.load({"activation_checkpointing": section})
    assert config.infinity.activations.device == "cpu"
    assert config.notes.ignored == ("activation_checkpointing.partition_activations",)
    with pytest.raises(ConfigError, match="cpu_checkpointing: must be true or false"):
        Config.load({"activation_checkpointing": {"cpu_checkpointing": 3}})

"""Precision of a forward: `torch_autocast`, `auto_cast` and the dtypes of buffers, against plain loops."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.config import Config
from infinity.engine.precision import ForwardPrecision, warn_of_emulation
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.plan.policy import compute_dtype
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, plain, trained
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = token_batches(4)


def with_autocast(config: Config, dtype: str = "bf16") -> Config:
    section = {"torch_autocast": {"enabled": True, "dtype": dtype}}
    return Config.load({**config.model_dump(mode="json", exclude_unset=True), **section})


def by_hand(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss: torch.Tensor = model(*batch)
    return loss


# -- torch_autocast ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("cpu", {"accumulation": 2, "clip": 0.5}),
        ("nvme", {}),
        ("nvme", {"accumulation": 2, "clip": 0.5}),
        ("nvme", {"stage": 2, "param": "none"}),
    ],
)
def test_training_equals_a_loop_under_autocast(place: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The section gives the bits of a context around the engine, and a plain loop's parameters in any tier."""
    config = engine_config(**{"param": place, "optim": place, "folder": tmp_path, "prefetch_bytes": 0, **options})
    result = trained(seeded(Stack), BATCHES, with_autocast(config))
    assert_same(result, trained(seeded(Stack), BATCHES, config, loss_of=by_hand))
    expected = plain(seeded(Stack), BATCHES, config, by_hand)
    assert result.losses[0] == expected.losses[0]
    assert_close(result, expected, loss=1e-6, parameters=1e-5)
    assert result.losses != trained(seeded(Stack), BATCHES, config).losses
    assert {value.dtype for value in result.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_are_recomputed_under_autocast(reentrant: bool) -> None:
    """A checkpointed block computes the same in forward and in backward."""

    def make() -> Stack:
        return Stack(run=lambda block, x: checkpoint(block, x, use_reentrant=reentrant))

    config = engine_config(prefetch_bytes=0)
    result = trained(seeded(make), BATCHES[:3], with_autocast(config))
    assert_same(result, trained(seeded(Stack), BATCHES[:3], config, loss_of=by_hand))


class Seen(Linears):
    """Notes the autocast that is active in its forward, and raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, torch.dtype]] = []
        self.fails = False

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        if self.fails:
            raise RuntimeError("no")
        return super().forward(x, targets)


def test_every_forward_of_the_model_is_in_the_context() -> None:
    """Calls of the engine and of the model, in evaluation, within another context, and one that raises."""
    [batch] = vector_batches(1)
    model = seeded(Seen)
    with open_engine(model, with_autocast(engine_config("none", "cpu"))) as engine:
        engine(*batch)
        with torch.no_grad():
            model(*batch)
        with torch.autocast("cpu", torch.float16):
            engine(*batch)
            assert torch.get_autocast_dtype("cpu") == torch.float16
        model.fails = True
        with pytest.raises(RuntimeError, match="no"):
            engine(*batch)
        assert not torch.is_autocast_enabled("cpu")
        assert model.seen == [(True, torch.bfloat16)] * 4
        model.fails = False
        assert_nothing_leaked(engine)
    model(*batch)
    assert model.seen[-1][0] is False


def test_a_context_of_the_script_stays_without_the_section() -> None:
    model = seeded(Seen)
    with open_engine(model, engine_config()) as engine, torch.autocast("cpu", torch.bfloat16):
        engine(*vector_batches(1)[0])
    assert model.seen == [(True, torch.bfloat16)]


def test_an_engine_for_inference_runs_under_autocast() -> None:
    config = with_autocast(engine_config())
    with torch.no_grad(), infinity.init_inference(seeded(Stack), config, device=CpuDevice()) as engine:
        expected = by_hand(seeded(Stack), BATCHES[0])
        assert torch.equal(engine(*BATCHES[0]), expected)
        assert not torch.equal(engine.module(*BATCHES[0]), seeded(Stack)(*BATCHES[0]))


FACTOR = 64.0
"""Factor of the losses with which gradients in float16 overflow at the first loss scale."""


def scaled_plain(batches: Any, clip: float) -> tuple[Result, list[float]]:
    """Train with `torch.amp.GradScaler`, and return the scale after each step, too."""
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for batch in batches:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = model(*batch)
        scaler.scale(loss * FACTOR).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Result(losses, {name: p.detach() for name, p in model.named_parameters()}), scales


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_float16_equals_a_loop_with_a_grad_scaler(clip: float, tmp_path: Path) -> None:
    """Steps overflow, are skipped and halve the scale as GradScaler's; a checkpoint restores the scale."""
    batches = token_batches(8)
    expected, scales = scaled_plain(batches, clip)
    config = with_autocast(engine_config(clip=clip, folder=tmp_path), "fp16")
    losses: list[float] = []
    found: list[float] = []

    def run(engine: TrainingEngine, part: Any) -> None:
        for batch in part:
            loss = engine(*batch)
            engine.backward(loss * FACTOR)
            engine.step()
            losses.append(loss.item())
            found.append(engine.loss_scale.value)

    with open_engine(seeded(Stack), config) as engine:
        run(engine, batches[:6])
        skipped = engine.skipped_steps
        engine.save_checkpoint(tmp_path / "saved")
    with open_engine(seeded(Stack), config) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        run(engine, batches[6:])
        assert engine.skipped_steps == skipped > 1
        assert_close(Result(losses, parameters_of(engine)), expected, loss=1e-3, parameters=1e-4)
        engine(*batches[0]).backward()
        with pytest.raises(UsageError, match=r"engine.scale\(loss\).backward"):
            engine.step()
    assert found == scales and scales[-1] < scales[0]


# -- auto_cast ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class Nested(nn.Module):
    """Takes tensors in containers, and notes the dtypes that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.seen: list[torch.dtype] = []

    def forward(self, pair: Pair, rest: dict[str, list[Any]], *, weight: torch.Tensor) -> torch.Tensor:
        tensors = [pair.x, pair.y, *rest["listed"], weight]
        self.seen = [tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)]
        x = pair.x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (F.mse_loss(x, pair.y, reduction="none").mean(-1) * weight).mean()


@pytest.mark.parametrize(("section", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_float_inputs_are_cast(section: str, dtype: torch.dtype) -> None:
    """Floating-point tensors among the positional arguments, in containers too; others and keywords stay."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 8, generator=generator)
    x.requires_grad_()
    listed, weight = [torch.arange(3), "text", torch.ones(1, dtype=torch.float64)], torch.ones(4)
    losses = []
    for auto_cast in (True, False):
        config = Config.load(
            {"train_batch_size": 4, section: {"enabled": True, "auto_cast": auto_cast}, "infinity": {"unit_size": 64}}
        )
        pair = Pair(x, y) if auto_cast else Pair(x.to(dtype), y.to(dtype))
        with open_engine(seeded(Nested), config) as engine:
            for _ in range(3):
                loss = engine(pair, {"listed": listed}, weight=weight)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            if auto_cast:
                assert engine.module.seen == [dtype, dtype, torch.int64, dtype, torch.float32]  # type: ignore[comparison-overlap]
                assert x.grad is not None and x.grad.dtype == torch.float32
            else:
                with pytest.raises(RuntimeError, match="dtype"):
                    engine(Pair(x, y), {"listed": []}, weight=weight)
    assert losses[:3] == losses[3:]


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """A layer with buffers of several dtypes, one of which its class names for fp32 as transformers' models do."""

    _keep_in_fp32_modules_strict = ("correction",)
    _keep_in_fp32_modules = frozenset({"half_*"})

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8))
        self.register_buffer("correction_bias", torch.rand(8, dtype=torch.bfloat16))
        self.register_buffer("half_scale", torch.rand(8, dtype=torch.float16))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({}, "fp32 bf16 fp16"),
        ({"data_types": {"buffer_dtype": "bf16"}}, "fp32 bf16 fp16"),
        ({"bf16": {"enabled": True}}, "fp32 fp32 fp16"),
        ({"fp16": {"enabled": True}}, "fp32 fp32 fp32"),
        ({"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": []}}, "fp32 bf16 fp16"),
        ({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}, "bf16 fp32 bf16"),
        (
            {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "fp16", "keep_in_fp32_modules": ["part.f*s"]}},
            "fp32 fp16 fp16",
        ),
    ],
)
def test_dtypes_of_buffers(top: dict[str, Any], expected: str) -> None:
    """`buffer_dtype` casts floating-point buffers in 16-bit training only; listed ones are fp32."""
    model = nn.ModuleDict({"part": seeded(Buffered)})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held = model["part"].frequencies
    engine, *_ = infinity.initialize(model, {"train_batch_size": 1, **top})
    with engine:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        *floats, count = model.buffers()
        assert " ".join(names[buffer.dtype] for buffer in floats) == expected
        assert count.dtype == torch.int64 and model["part"].frequencies is held
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name].to(buffer.dtype)), name


def test_inputs_in_host_memory_move_to_the_device_of_the_engine() -> None:
    """Nested tensors move, scalars stay, as PyTorch combines them with tensors of any device."""
    Pair = namedtuple("Pair", "left right")
    batch = {"ids": torch.zeros(2, 3), "rest": [Pair(torch.ones(4), None)], "scale": torch.tensor(2.0), "name": "x"}
    run = ForwardPrecision(torch.device("meta"), None, None).around(lambda *args, **kwargs: (args, kwargs))
    (first,), keywords = run(batch, mask=torch.ones(2))
    assert first["ids"].device.type == first["rest"][0].left.device.type == keywords["mask"].device.type == "meta"
    assert first["rest"][0].right is None and first["name"] == "x"
    assert first["scale"].device.type == "cpu" and first["scale"] == 2


def test_forwards_on_the_host_without_casts_need_no_wrapper() -> None:
    assert ForwardPrecision.of(Config.load({"train_batch_size": 1}), torch.device("cpu"), None) is None
    assert ForwardPrecision.of(Config.load({"train_batch_size": 1}), torch.device("meta"), None) is not None


# -- devices that emulate bf16 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["bf16", "fp16", "torch_autocast"])
@pytest.mark.parametrize("emulated", [False, True])
def test_bf16_on_a_device_that_emulates_it_warns(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, section: str, emulated: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not emulated)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    values = {"enabled": True, "dtype": "bf16"} if section == "torch_autocast" else {"enabled": True}
    config = Config.load({"train_micro_batch_size_per_gpu": 1, section: values})
    warn_of_emulation(config, compute_dtype(config), torch.device("cuda", 0))
    warn_of_emulation(config, compute_dtype(config), torch.device("cpu"))
    assert len(recwarn) == (emulated and section != "fp16")

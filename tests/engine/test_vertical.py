"""`engine.train_batch(blocks=...)`: the bits of a loop over micro-batches, and fewer fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infinity.errors import ModelError
from infinity.nn import tile
from infinity.sim.gpt2 import GPT2, GPT2Config
from support.loops import open_engine, parameters_of
from support.models import VOCABULARY, Block, Linears, Stack, seeded, token_batches, vector_batches
from support.whole_steps import STEPS, check, config_of, loop, outcome, plainly


def gpt2(*, tied: bool = True, checkpointed: bool = False) -> nn.Module:
    return GPT2(GPT2Config(VOCABULARY, 8, 4, 32, 2, tie_word_embeddings=tied, checkpoint_activations=checkpointed))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tied=False),
    "gpt2 checkpointed": lambda: gpt2(checkpointed=True),
    "stack": Stack,
    "stack tied": lambda: Stack(tied=True),
}


@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_ordinary_order(name: str, update: str) -> None:
    check(MODELS[name], config_of(update=update))


@pytest.mark.parametrize(
    "options",
    [
        {"param": "cpu", "optim": "cpu"},
        {"param": "none", "optim": "none"},
        {"param": "nvme", "optim": "cpu"},
        {"bf16": True, "accumulated_in": "bf16"},
        {"clip": 0.1, "bf16": True, "accumulation": 5},
        {"fp16": {"initial_scale_power": 24, "hysteresis": 1}, "clip": 0.1},
        {"unit_size": 4000},
        {"moments": "8bit", "bf16": True},
        {"activations": {"device": "cpu", "min_bytes": 1}},
        {"activations": {"device": "nvme", "min_bytes": 1}, "accumulation": 2},
        {"accumulation_buffers": True, "optimizer": "Adam", "weight_decay": 0.1, "check_nan": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "stack"])
def test_the_bits_in_every_configuration(name: str, options: dict[str, Any]) -> None:
    check(MODELS[name], config_of(**options))


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"initial_scale_power": 8, "hysteresis": 1}},
}


@pytest.mark.parametrize("optim", ["cpu", "nvme"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "stack"])
@pytest.mark.parametrize(
    "model, accumulated_in",
    [(model, dtype) for model in FORMATS for dtype in FORMATS if dtype != "fp16" or model == "fp16"],
)
def test_the_bits_in_every_dtype_of_gradients(
    model: str, accumulated_in: str, name: str, accumulation: int, clip: float, optim: str
) -> None:
    """Gradients are rounded as often as in the ordinary order, where their sum has fewer bits than they have, too."""
    config = config_of(accumulation, accumulated_in=accumulated_in, clip=clip, optim=optim, **FORMATS[model])
    check(MODELS[name], config, reason="" if accumulation > 1 else "is 1")


def test_steps_that_overflow_are_skipped_alike() -> None:
    config = config_of(fp16={"initial_scale_power": 24, "hysteresis": 1})
    check(gpt2, config)
    with open_engine(seeded(gpt2), config) as engine:
        batches = iter(token_batches(STEPS * 3))
        for _ in range(STEPS):
            engine.train_batch(batches, blocks=engine.module.h)
        assert engine.skipped_steps


class TwoStreams(nn.Module):
    """Blocks take two tensors, and one of them twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, *, again: torch.Tensor, other: torch.Tensor) -> Any:
            y = torch.tanh(self.linear(x) + other * again)
            return y, other + y * x

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        other = x * 2
        for block in self.blocks:
            x, other = block(x, again=x, other=other)
        return F.mse_loss(x + other, y)


@pytest.mark.parametrize("make", [TwoStreams, Linears], ids=lambda make: make.__name__)
def test_models_of_other_blocks(make: Callable[[], nn.Module]) -> None:
    check(make, config_of(unit_size=4000), batches=vector_batches(STEPS * 3))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 8))


def test_a_sequential_with_a_loss_function() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 32, generator=generator) for _ in range(12)]

    def loss_fn(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (output - batch[:, :8]).square().mean()

    check(
        sequential,
        config_of(unit_size=4000),
        batches=batches,
        loss_of=lambda model, batch: loss_fn(model(batch), batch),
        loss_fn=loss_fn,
        blocks=lambda model: list(model)[1:-1],
    )


@pytest.mark.parametrize("form", ["mapping", "attribute", "tuple", "list"])
def test_forms_of_batches_and_outputs(form: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            loss = self.stack(tokens, targets)
            if form == "mapping":
                return {"loss": loss}
            return (loss, tokens) if form == "tuple" else type("Output", (), {"loss": loss})

    batches: list[Any] = token_batches(12)
    loss_of = {
        "mapping": lambda model, batch: model(**batch)["loss"],
        "attribute": lambda model, batch: model(*batch).loss,
        "tuple": lambda model, batch: model(*batch)[0],
        "list": lambda model, batch: model(*batch).loss,
    }[form]
    if form == "mapping":
        batches = [{"tokens": tokens, "targets": targets} for tokens, targets in batches]
    if form == "list":
        batches = [list(batch) for batch in batches]
    check(Outer, config_of(), batches=batches, loss_of=loss_of)


def test_frozen_blocks_below_trained_ones() -> None:
    """They are left out of `blocks`."""

    def make() -> nn.Module:
        model = Stack()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    check(make, config_of(), blocks=lambda model: model.blocks[1:])

    def adapted() -> nn.Module:
        model = Stack()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "up.bias" in name)
        return model

    check(adapted, config_of())


class NoGradient(torch.autograd.Function):
    """The identity, whose backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


STOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": torch.Tensor.detach,
    "none": NoGradient.apply,  # type: ignore[dict-item]
    "sometimes": lambda x: NoGradient.apply(x) if x.sum() > 0 else x,  # type: ignore[no-any-return, no-untyped-call]
}


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", STOPS)
def test_gradients_that_end_in_a_block(way: str, tied: bool, update: str) -> None:
    """A tied head keeps its gradients, and the parts below get none, not zeros."""

    class Stops(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(STOPS[way](x))

    def make() -> nn.Module:
        model = Stack(tied=tied)
        model.blocks[3] = Stops(32)
        return model

    check(make, config_of(update=update))


def test_blocks_of_complex_tensors() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.complex(torch.tanh(self.linear(z.real)), z.imag)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Complex() for _ in range(6))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            z = torch.complex(x, 2 * x)
            for block in self.blocks:
                z = block(z)
            return F.cross_entropy(self.head(z.real + z.imag).flatten(0, 1), targets.flatten())

    check(Model, config_of(unit_size=4000))


def test_micro_batches_of_different_shapes() -> None:
    batches = [tuple(part[: 1 + n % 4, : 8 - n % 3] for part in batch) for n, batch in enumerate(token_batches(12))]
    check(Stack, config_of(), batches=batches)


def test_a_model_with_tiles() -> None:
    """A head of more parameters than the blocks."""

    class Tall(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 4096)
            tile(self, "64KiB")

    check(Tall, config_of(), blocks=lambda model: model.blocks)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_profiled_step_runs_as_a_loop(step: int) -> None:
    config = config_of()
    profiler = config.flops_profiler.model_copy(update={"enabled": True, "profile_step": step})
    config = config.model_copy(update={"flops_profiler": profiler})
    check(Stack, config, reason="flops_profiler" if step == STEPS - 1 else "")


@pytest.mark.parametrize(
    "options", [{"stage": 0, "param": "none"}, {"stage": 2, "param": "none"}, {"cache_bytes": "1GiB"}]
)
def test_parameters_that_stay_need_no_other_order(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infinity"):
        check(Stack, config_of(**options), reason="all parameters fit")
    assert len([record for record in caplog.records if "all parameters fit" in record.message]) == 1


def test_blocks_that_change_between_steps() -> None:
    with open_engine(seeded(Stack), config_of()) as engine:
        batches = iter(token_batches(STEPS * 3))
        losses = [engine.train_batch(batches, blocks=engine.module.blocks[step:]) for step in range(STEPS)]
        found = outcome(engine, losses)
    expected = loop(Stack, config_of(), token_batches(STEPS * 3), plainly)
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if name != "norms")


# -- traffic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 4])
def test_parameters_move_once_a_step(accumulation: int) -> None:
    """Fetches of a step do not depend on the number of micro-batches."""

    def fetches(batched: bool) -> list[int]:
        config = config_of(accumulation, update="next_forward", prefetch_bytes=0)
        with open_engine(seeded(lambda: Stack(depth=12)), config) as engine:
            batches = iter(token_batches(6 * accumulation))
            counts = []
            for _ in range(6):
                before = engine.ledger.snapshot()
                if batched:
                    engine.train_batch(batches, blocks=engine.module.blocks)
                else:
                    for _ in range(accumulation):
                        engine.backward(engine(*next(batches)))
                        engine.step()
                engine.settle()
                counts.append((engine.ledger.snapshot() - before).fetches)
            return counts

    assert fetches(True)[-1] * accumulation <= fetches(False)[-1] * 1.1


# -- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bf16": True, "clip": 0.5}], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers(name: str, checkpointed: bool, options: dict[str, Any]) -> None:
    hugging_face = pytest.importorskip("support.hugging_face")

    def make() -> nn.Module:
        model = hugging_face.MODELS[name]()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        return model  # type: ignore[no-any-return]

    batches = [{"input_ids": (ids + n) % 67, "labels": ids} for n in range(3) for (ids,) in hugging_face.BATCHES[:4]]
    config = config_of(unit_size=4000, **options)
    check(make, config, batches=batches, loss_of=lambda model, batch: model(**batch).loss)


# -- infinity.debug ------------------------------------------------------------------------------------------------


class Shares(Stack):
    """Each forward changes a number that the blocks read."""

    factor = 1.0

    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.owner[0].factor  # type: ignore[no-any-return, attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scaling(32) for _ in range(6))
        for block in self.blocks:
            block.owner = [self]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.factor = 1 + float(tokens[0, 0]) / VOCABULARY
        return super().forward(tokens, targets)


class OnlyInBackward(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the number of the backward, modulo 2."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        OnlyInBackward.count += 1
        return gradient * (1 + (OnlyInBackward.count // 2) % 2)


class Backwards(Stack):
    """Backward of the second block depends on the order of micro-batches and blocks."""

    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = OnlyInBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return made

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scaling(32) for _ in range(6))
        OnlyInBackward.count = 0


class Averages(Stack):
    """A buffer, which no forward reads, counts blocks in the order in which they run."""

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = self.owner[0].seen  # type: ignore[attr-defined]
            seen.data.mul_(0.9).add_(x.detach().mean())  # without a version, which would show it
            return super().forward(x)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Counting(32) for _ in range(6))
        self.register_buffer("seen", torch.zeros(()))
        for block in self.blocks:
            block.owner = [self]


@pytest.mark.parametrize(
    ("make", "name"),
    [(Shares, "the loss of micro-batch 0"), (Backwards, "the gradient of "), (Averages, "buffer seen")],
)
@pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
def test_a_step_that_differs_from_a_loop_is_an_error(make: Callable[[], nn.Module], name: str, update: str) -> None:
    """`infinity.debug` finds it in the first step, before the update."""
    with open_engine(seeded(make), config_of(update=update)) as engine:
        before = parameters_of(engine)
        with pytest.raises(ModelError, match=f"{name}.* differs from that of a loop"):
            engine.train_batch(iter(token_batches(3)), blocks=engine.module.blocks)
        assert engine.global_steps == 0 and engine.micro_steps == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        engine.train_batch(iter(token_batches(3)))


@pytest.mark.parametrize("trained", [False, True])
def test_a_compared_step_runs_each_forward_twice(trained: bool) -> None:
    """Later ones run it once, and a step without `debug` too. trained: after steps of a loop."""
    for debug in (False, True):
        with open_engine(seeded(Stack), config_of(debug=debug)) as engine:
            forwards = 0

            def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
                nonlocal forwards
                forwards += 1
                return loss

            if trained:
                engine.train_batch(iter(token_batches(3)))
                engine.train_batch(iter(token_batches(3)))
            counts = []
            for _ in range(3):
                engine.train_batch(iter(token_batches(3)), loss_fn, blocks=engine.module.blocks)
                counts.append(forwards)
            assert counts == ([6, 9, 12] if debug else [3, 6, 9])


class Normalises(Stack):
    """Running statistics of its own in each block."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(self.linear(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Normed() for _ in range(6))


@pytest.mark.parametrize("debug", [False, True])
def test_statistics_of_blocks_are_counted_once(debug: bool) -> None:
    found = []
    for declared in (False, True):
        with open_engine(seeded(Normalises), config_of(debug=debug, unit_size=1000)) as engine:
            batches = iter(token_batches(6))
            for _ in range(2):
                engine.train_batch(batches, blocks=engine.module.blocks if declared else None)
            found.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())

"""The trace is a hint, never a contract: other orders, other subsets, evaluation in between, several forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from conftest import OpenEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_nothing_leaked, assert_trains_like_plain, run_forward
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(8)
SCHEDULES = pytest.mark.parametrize(
    "options", [{}, {"clip": 0.5}, {"accumulation": 2}, {"prefetch_bytes": 70_000}], ids=str
)
DEVICES = pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])


class Wandering(Stack):
    """The blocks in another order every time, some left out, some twice."""

    step = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.step)
        self.step += 1
        x = self.embedding(tokens)
        for index in torch.randint(0, len(self.blocks), (7,), generator=generator).tolist():
            x = self.blocks[index](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@DEVICES
@SCHEDULES
def test_another_path_every_step(options: dict[str, Any], late: bool) -> None:
    """A parameter without a gradient is left alone, its step count and moments too, as torch.optim.AdamW does."""
    assert_trains_like_plain(Wandering, BATCHES, units=8, device=LateDevice() if late else None, **options)


class Gated(Stack):
    """Blocks run or not by what is in the batch."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if (int(tokens[0, 0]) >> number) % 2 == 0:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@DEVICES
@SCHEDULES
def test_a_path_that_data_decides(options: dict[str, Any], late: bool) -> None:
    assert_trains_like_plain(Gated, BATCHES, units=8, device=LateDevice() if late else None, **options)


class Halved(Stack):
    """Within a block, half of the parameters get no gradient in every other step."""

    step = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.step % 2 else x + F.gelu(block.up(x))[..., :32]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@SCHEDULES
def test_parameters_unused_in_a_step(options: dict[str, Any]) -> None:
    assert_trains_like_plain(Halved, BATCHES, units=8, **options)


def test_parameters_that_are_never_used(make_engine: OpenEngine) -> None:
    class Spare(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(32, 64)

    assert_trains_like_plain(Spare, BATCHES, units=9)


@pytest.mark.parametrize("options", [{"clip": 0.5}, {"update": "after_backward"}, {"update": "next_forward"}], ids=str)
@DEVICES
def test_evaluation_between_steps_and_between_backward_and_step(options: dict[str, Any], late: bool) -> None:
    config = engine_config(prefetch_bytes=0, **options)
    reference = seeded(Stack)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(seeded(Stack), config, LateDevice() if late else None) as engine:
        for batch, other in zip(BATCHES, reversed(BATCHES), strict=True):
            seen = []
            for module in (engine.module, reference):
                seen.append([run_forward(module, *other), run_forward(module, *batch)])
                module(*batch).backward()
                seen[-1] += [run_forward(module, *other), run_forward(module, *other)]
            if config.gradient_clipping > 0:
                nn.utils.clip_grad_norm_(reference.parameters(), config.gradient_clipping)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            assert seen[0] == pytest.approx(seen[1], rel=1e-6)
        found = parameters_of(engine)
        assert_nothing_leaked(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def read_all(engine: TrainingEngine, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Read the model's values in every way: name → result, or the UsageError that it raises."""
    weight = engine.module.blocks[5].up.weight
    ways = {
        "loss": lambda: run_forward(engine.module, *batch),
        "engine": lambda: run_forward(engine, *batch),
        "state_dict": lambda: engine.state_dict()["blocks.5.up.weight"],
        "module.state_dict": lambda: engine.module.state_dict()["blocks.5.up.weight"],
        "attribute": lambda: engine.module.blocks[5].up.weight.detach().clone(),
        "kept parameter": lambda: weight.detach().clone(),
        "get_full_fp32_param": lambda: infinity.get_full_fp32_param(weight),
    }
    found: dict[str, Any] = {}
    for name, look in ways.items():
        try:
            found[name] = look()
        except UsageError as error:
            found[name] = str(error)
    return found


@DEVICES
@pytest.mark.parametrize("placement", ["none", "nvme"])
@pytest.mark.parametrize("update", ["auto", "during_backward", "next_forward", "after_backward"])
def test_nobody_sees_updated_parameters_before_the_step(late: bool, placement: str, update: str) -> None:
    """Reads between backward and step give the values of before the step, or raise one error that names the fix."""
    config = engine_config(placement, placement, prefetch_bytes=0, update=update)
    refused = 0
    with open_engine(seeded(Stack), config, LateDevice() if late else None) as engine:
        for batch, other in zip(BATCHES, reversed(BATCHES), strict=True):
            before = read_all(engine, other)
            assert not any(isinstance(value, str) for value in before.values())
            engine.backward(engine(*batch))
            for name, value in read_all(engine, other).items():
                if isinstance(value, str):
                    assert 'infinity.update to "next_forward"' in value, name
                    refused += 1
                else:
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name])), name
            engine.step()
    assert bool(refused) == (update in ("auto", "during_backward"))


@SCHEDULES
def test_a_users_own_backward(options: dict[str, Any]) -> None:
    """`loss.backward()` without the engine; the user divides by the accumulation."""
    config = engine_config(**{"prefetch_bytes": 0, **options})
    expected = plain(seeded(Stack), BATCHES, config)
    with open_engine(seeded(Stack), config) as engine:
        losses = []
        for batch in BATCHES:
            loss = engine(*batch)
            (loss / engine.batch.accumulation).backward()
            engine.step()
            losses.append(loss.item())
        del loss
        result = Result(losses, parameters_of(engine))
        assert engine.global_steps == len(BATCHES) // engine.batch.accumulation
        assert_nothing_leaked(engine)
    assert_close(result, expected)


@SCHEDULES
@DEVICES
def test_several_forwards_for_one_backward(options: dict[str, Any], late: bool) -> None:
    def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        tokens, targets = batch
        first = model(tokens, targets)
        with torch.no_grad():
            model(targets, tokens)
        second = model(tokens.flip(0), targets)
        total: torch.Tensor = first + 0.5 * second
        return total

    device = LateDevice() if late else None
    assert_trains_like_plain(Stack, BATCHES, units=8, loss_of=loss_of, device=device, **options)


@pytest.mark.parametrize("options", [{"clip": 0.5}, {"update": "after_backward"}], ids=str)
def test_several_backwards_for_one_step(options: dict[str, Any]) -> None:
    """Gradients of consecutive backwards are summed, as in `.grad`."""
    config = engine_config(prefetch_bytes=0, **options)
    reference = seeded(Stack)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(seeded(Stack), config) as engine:
        for first, second in zip(BATCHES[::2], BATCHES[1::2], strict=True):
            for module in (engine.module, reference):
                module(*first).backward()
                module(*second).backward()
            if config.gradient_clipping > 0:
                nn.utils.clip_grad_norm_(reference.parameters(), config.gradient_clipping)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        found = parameters_of(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_second_backward_after_an_update_during_backward_is_refused(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack))
    train(engine, BATCHES[:2])
    engine.backward(engine(*BATCHES[2]))
    with pytest.raises(UsageError, match="gradient_accumulation_steps"):
        engine.backward(engine(*BATCHES[3]))
    with pytest.raises(UsageError, match="gradient_accumulation_steps"):
        engine(*BATCHES[3])


class Shifts(nn.Module):
    """Adds parameters, for which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(nn.ParameterList([torch.zeros(32)]) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            x = x + shift[0]
        return x


def test_a_second_backward_that_needs_no_parameters_is_refused(make_engine: OpenEngine) -> None:
    """Only its graph reveals it, before a gradient arrives: the step goes on as if it had not been called."""
    engine = make_engine(seeded(Shifts), unit_size=256, cache_bytes=1 << 20, update="during_backward")
    reference = seeded(Shifts)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    for x in torch.randn(4, 4, 32):
        reference(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        out = engine(x)
        out.square().mean().backward()
        if engine.global_steps >= 2:
            assert engine.parts.schedule.step.updated
            with pytest.raises(UsageError, match="backward was called more than gradient_accumulation_steps times"):
                out.sum().backward()
        engine.step()
    found = parameters_of(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class TwoParts(Stack):
    """Two models in one, with losses of their own."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        def loss(blocks: Any) -> torch.Tensor:
            x = F.one_hot(tokens, 32).float()
            for block in blocks:
                x = block(x)
            return x.square().mean()

        return loss(self.blocks[:2]), loss(self.blocks[2:])


def test_a_second_backward_of_other_units(make_engine: OpenEngine) -> None:
    """It reaches no unit that the first one has updated."""
    batches = [(tokens % 32, targets) for tokens, targets in BATCHES]
    reference = seeded(TwoParts)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    engine = make_engine(seeded(TwoParts), prefetch_bytes=0)
    for batch in batches:
        for module in (engine.module, reference):
            for loss in module(*batch):
                loss.backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    found = parameters_of(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_two_losses_of_one_forward(make_engine: OpenEngine) -> None:
    """The second backward's graph still references the units, so the first updates none of them."""

    class TwoHeaded(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
            return loss, x.square().mean()

    reference = seeded(TwoHeaded)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    engine = make_engine(seeded(TwoHeaded), prefetch_bytes=0)
    for batch in BATCHES:
        for module in (engine.module, reference):
            loss, penalty = module(*batch)
            loss.backward(retain_graph=True)
            penalty.backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        del loss, penalty
    found = parameters_of(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_repeated_forwards_as_in_generation(make_engine: OpenEngine) -> None:
    """One more token each time, without gradients: equals the plain model, with the next units prefetched."""

    class Generates(Stack):
        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            out: torch.Tensor = self.head(x)
            return out

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.logits(tokens)
            return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        @torch.no_grad()
        def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
            for _ in range(count):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
            return tokens

    reference, model = seeded(Generates), seeded(Generates)
    engine = make_engine(model)
    prompt = BATCHES[0][0][:1, :4]
    assert torch.equal(model.generate(prompt, 12), reference.generate(prompt, 12))
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    reference(*BATCHES[0]).backward()
    optimizer.step()
    assert torch.equal(model.generate(prompt, 12), reference.generate(prompt, 12))
    with torch.inference_mode():
        assert model(prompt).isfinite().all()
    assert_nothing_leaked(engine)


def test_a_step_without_a_backward_is_refused(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack))
    engine(*BATCHES[0])
    with pytest.raises(UsageError, match="without a backward"):
        engine.step()


def test_a_submodule_called_by_itself(make_engine: OpenEngine) -> None:
    reference, model = seeded(Stack), seeded(Stack)
    engine = make_engine(model, prefetch_bytes=0)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for module in (model, reference):
        module.blocks[3](x).square().mean().backward()
    engine.step()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer.step()
    found = parameters_of(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert_nothing_leaked(engine)


def test_gradients_that_zero_grad_drops(make_engine: OpenEngine) -> None:
    """As in plain PyTorch, a batch whose gradients are dropped has no effect."""
    kept, dropped = token_batches(2)
    losses = []
    for skip in (False, True):
        engine = make_engine(seeded(Stack), update="next_forward")
        engine.optimizer.zero_grad()  # nothing is there to be dropped, at first and after every step
        if skip:
            engine.backward(engine(*dropped))
            engine.optimizer.zero_grad()
            with pytest.raises(UsageError, match="without a backward"):
                engine.step()
        engine.backward(engine(*kept))
        engine.step()
        engine.optimizer.zero_grad()
        losses.append(engine(*kept).item())
        engine.close()
    assert losses[0] == losses[1]


def test_gradients_that_zero_grad_cannot_drop(make_engine: OpenEngine) -> None:
    batches = token_batches(2)
    engine = make_engine(seeded(Stack), accumulation=2)
    engine.backward(engine(*batches[0]))
    with pytest.raises(UsageError, match=r"1 of 2 micro-batches.*engine.drop_gradients"):
        engine.optimizer.zero_grad()
    engine.close()
    engine = make_engine(seeded(Stack), update="during_backward")
    for batch in batches:  # the second updates units as it goes
        engine.backward(engine(*batch))
        if batch is batches[1]:
            with pytest.raises(UsageError, match="next_forward"):
                engine.optimizer.zero_grad()
        engine.step()

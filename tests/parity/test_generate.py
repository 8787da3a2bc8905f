"""`generate` of unmodified `transformers` models says, token for token, what the plain model says: from every tier,
with and without training, in the middle of it, by every way of decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.base import BaseEngine
from infinity.engine.inference import InferenceEngine
from infinity.errors import UsageError
from infinity.tiers.device import CpuDevice
from support.configs import DEVICES, engine_config
from support.hugging_face import BATCHES, VOCABULARY, gpt2, llama, loss_of, transformers
from support.late_device import LateDevice
from support.lifetime import Residents, assert_nothing_leaked, pool_buffers
from support.loops import open_engine
from support.models import seeded

PROMPT = BATCHES[0][0][:, :4]
NEW = 7
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def t5() -> nn.Module:
    """Return a T5, whose encoder `generate` calls directly, once."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5}


def say(generate: Callable[..., torch.Tensor], how: str, device: Any = "cpu") -> list[list[int]]:
    torch.manual_seed(7)
    prompt = PROMPT.to(device)
    mask = torch.ones_like(prompt)
    said = generate(prompt, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, **DECODING[how])
    return said.tolist()  # type: ignore[no-any-return]


def expected(model: Any, how: str) -> list[list[int]]:
    training = model.training
    said = say(model.eval().generate, how)
    model.train(training)
    return said


def opened(make: Callable[[], nn.Module], param: str, folder: Path, **options: Any) -> InferenceEngine:
    config = engine_config(param=param, folder=folder, unit_size=60_000, **{"prefetch_bytes": 0, **options})
    return infinity.init_inference(seeded(make), config, device=CpuDevice())


@pytest.mark.parametrize("param", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_with_an_inference_engine(name: str, param: str, tmp_path: Path) -> None:
    reference = seeded(MODELS[name])
    with opened(MODELS[name], param, tmp_path) as engine:
        residents = Residents(engine)
        for how in DECODING:
            assert say(engine.generate, how) == expected(reference, how)
        with torch.inference_mode():
            assert say(engine.module.generate, "greedy") == expected(reference, "greedy")  # type: ignore[operator,arg-type]
        in_place = engine.parts.plan.in_place
        assert residents.most - len(in_place) <= pool_buffers(engine) < len(engine.units)
        assert len(in_place) == (0 if param == "nvme" else len(engine.units))
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)


def test_on_a_device_of_its_own(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, unit_size=60_000, prefetch_bytes=30_000)
    with infinity.init_inference(seeded(llama), config, device=LateDevice()) as engine:
        for how in DECODING:
            assert say(engine.generate, how) == expected(seeded(llama), how)


@pytest.mark.parametrize("how", DECODING)
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_while_training(name: str, options: dict[str, Any], how: str, tmp_path: Path) -> None:
    """Before the first step, between micro-batches, between steps, and between backward and step where the update has
    not begun by then: there, and in what is trained after it, nothing shows that text was generated.
    """
    reference = seeded(MODELS[name]).eval()
    config = engine_config(folder=tmp_path, unit_size=60_000, prefetch_bytes=40_000, **options)
    accumulation = options.get("accumulation", 1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(seeded(MODELS[name]).eval(), config) as engine:
        waits = engine.parts.plan.update == "next_forward"
        assert say(engine.generate, how) == expected(reference, how)
        for number, batch in enumerate(BATCHES[:4], 1):
            loss, wanted = loss_of(engine, batch), loss_of(reference, batch)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
            engine.backward(loss)
            (wanted / accumulation).backward()  # type: ignore[no-untyped-call]
            if waits or number % accumulation:
                assert say(engine.generate, how) == expected(reference, how)
            engine.step()
            if number % accumulation == 0:
                if options.get("clip"):
                    nn.utils.clip_grad_norm_(reference.parameters(), options["clip"])
                optimizer.step()
                optimizer.zero_grad()
            assert say(engine.generate, how) == expected(reference, how)
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)


def test_between_backward_and_step_of_updates_during_backward(tmp_path: Path) -> None:
    """`generate` is refused once backward has updated a unit; before that it gives the text of before the step."""
    reference = seeded(llama).eval()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
    with open_engine(seeded(llama).eval(), engine_config(folder=tmp_path, unit_size=60_000, lr=1e-2)) as engine:
        begun = []
        for batch in BATCHES[:4]:
            engine.backward(loss_of(engine, batch))
            loss_of(reference, batch).backward()
            before = expected(reference, "greedy")
            optimizer.step()
            optimizer.zero_grad()
            begun.append(bool(engine.parts.schedule.step.updated))
            if begun[-1]:
                with pytest.raises(UsageError, match=r'infinity\.update to "next_forward"'):
                    say(engine.generate, "greedy")
            else:
                assert say(engine.generate, "greedy") == before
            engine.step()
            assert say(engine.generate, "greedy") == expected(reference, "greedy") != before
        assert begun == [False, True, True, True]  # no backward is known before the first


# -- what decoding reads -----------------------------------------------------------------------------------------------


class Steps:
    """Counts the fetches of every forward of the model."""

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine
        self.fetches: list[int] = []
        self._before = 0
        engine.module.register_forward_pre_hook(self._begin)
        engine.module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._before = self._engine.ledger.snapshot().fetches

    def _end(self, *_: Any) -> None:
        self.fetches.append(self._engine.ledger.snapshot().fetches - self._before)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_reads_no_unit_twice(name: str, prefetch: int, tmp_path: Path) -> None:
    """A token reads each unit at most once, and none that fits in the cache, besides prefetches: the trace predicts
    decoding.
    """
    with opened(MODELS[name], "nvme", tmp_path, prefetch_bytes=prefetch * 60_000, cache_bytes=2 * 60_000) as engine:
        used: set[int] = set()
        touch = engine.parts.schedule.trace.touch
        engine.parts.schedule.trace.touch = lambda unit: (used.add(unit), touch(unit))[1]  # type: ignore[method-assign,func-returns-value]
        say(engine.generate, "greedy")
        steps = Steps(engine)
        used.clear()
        say(engine.generate, "greedy")
        assert len(steps.fetches) == NEW
        decoding = steps.fetches[2:]
        assert max(decoding) <= len(used)
        assert sum(decoding) / len(decoding) <= max(0, len(used) - 2)

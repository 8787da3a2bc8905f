"""When a job evaluates, and which transfers its records have."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gpt2.data import load_corpus
from gpt2.meter import StepRecord
from gpt2.pretraining import Evaluation, Pretraining, generate
from gpt2.progress import Progress
from infinity.sim.gpt2 import GPT2, GPT2Config
from support.configs import engine_config
from support.loops import open_engine


def test_evaluation_comes_every_25_steps_and_at_the_end_by_default() -> None:
    assert [step for step in range(1, 61) if Evaluation().is_due(step, last=60)] == [25, 50, 60]


@pytest.mark.parametrize(("update", "cache_bytes"), [("next_forward", 0), ("during_backward", "1GiB")])
def test_evaluations_take_no_transfer_from_a_step(update: str, cache_bytes: int | str, tmp_path: Path) -> None:
    """A step's updates are in its record, although an evaluation follows it, and the next step reads all units."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is {n % 7} more than {n - n % 7}\n" for n in range(2000)))
    shape = GPT2Config(vocab_size=256, seq_length=32, num_layers=2, hidden_size=32, num_attention_heads=2)
    config = engine_config(update=update, unit_size=20_000, cache_bytes=cache_bytes, prefetch_bytes=0)
    due, resident, recorded = list[int](), list[int](), list[StepRecord]()
    console = Console(file=io.StringIO())
    with open_engine(GPT2(shape), config) as engine, Progress(3, console=console) as progress:
        pretraining = Pretraining(engine, shape, load_corpus(text), evaluation=Evaluation(interval=1, iters=1))

        def on_step(record: StepRecord) -> None:
            recorded.append(record)
            due.append(sum(unit.due_update is not None for unit in engine.units))

        pretraining.train(2, progress, on_step)
        resident.append(sum(unit.lease is not None for unit in engine.units))
    assert due == [0, 0] and resident == [0]
    assert all(record.nvme_bytes_written > 0 for record in recorded)


def test_greedy_and_sampled_text() -> None:
    torch.manual_seed(0)
    model = GPT2(
        GPT2Config(vocab_size=61, seq_length=19, num_layers=3, hidden_size=24, num_attention_heads=3, init_std=0.5)
    ).eval()
    prompt = torch.tensor([[3, 14, 15], [9, 26, 53]])
    greedy = generate(model, prompt, 30, seq_length=19, temperature=0.0)  # passes the model's length
    assert greedy.shape == (2, 33) and torch.equal(greedy[:, :3], prompt)
    assert torch.equal(greedy[:, 3], model(prompt)[:, -1].argmax(-1))
    assert torch.equal(greedy, generate(model, prompt, 30, seq_length=19, top_k=1))

    def sample(seed: int) -> torch.Tensor:
        return generate(model, prompt, 9, seq_length=19, top_k=20, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(3), sample(3)) and not torch.equal(sample(3), sample(4))
    assert not sample(3).requires_grad

"""A pretraining job with an engine around a GPT-2: train on windows of a text, evaluate, write a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt2.data import Corpus, TokenDataset, to_text, to_tokens
from gpt2.duration import (
    MEASURED_STEPS,
    Costs,
    choose_steps,
    max_steps,
    process_seconds,
    show_choice,
    step_seconds,
)
from gpt2.meter import Meter, StepRecord
from gpt2.progress import Progress
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError
from infinity.sim.gpt2 import GPT2Config


@dataclass(frozen=True)
class Evaluation:
    """When and on how much held-out text loss is measured; names and units are Megatron-LM's."""

    interval: int = 25
    """Steps between evaluations; 0 evaluates after the last step only."""
    iters: int = 4
    """Batches in an evaluation, each as large as a step's, evenly spread over the held-out text; 0 evaluates never."""

    def is_due(self, step: int, last: int) -> bool:
        return self.iters > 0 and (step == last or (self.interval > 0 and step % self.interval == 0))


class Pretraining:
    """All ranks make one of the same text and seed, and make the same calls."""

    def __init__(
        self,
        engine: TrainingEngine,
        shape: GPT2Config,
        corpus: Corpus,
        seed: int = 0,
        evaluation: Evaluation = Evaluation(),
        clock: Callable[[], float] = process_seconds,
    ) -> None:
        """clock: seconds since the job started, monotonic."""
        self.engine, self.shape, self.seed, self.evaluation = engine, shape, seed, evaluation
        self.corpus = corpus
        self.device = engine.device
        self._durable = engine.config.infinity.durable
        self.rank, self.world = engine.ranks.rank, engine.ranks.size
        self.text = TokenDataset(corpus.train, shape.seq_length, seed)
        self._held_out = self._held_out_windows(corpus)
        tokens_per_step = engine.batch.train * shape.seq_length
        self.meter = Meter(engine.ledger, tokens_per_step, self._sum_over_ranks, self.world)
        self.losses: list[tuple[int, float]] = []
        """(step, mean loss of its batch) of the steps trained here."""
        self.held_out_losses: list[tuple[int, float]] = []
        self.position = 0
        """Samples of the text that steps have consumed, on all ranks together."""
        self._clock = clock
        self._step_seconds: list[float] = []
        self._evaluation_seconds = 0.0
        """Duration of the last evaluation."""

    def _held_out_windows(self, corpus: Corpus) -> tuple[Tensor, Tensor] | None:
        """Inputs and targets that this rank evaluates, each (N, T) int64; None without evaluation."""
        if not self.evaluation.iters:
            return None
        windows = TokenDataset(corpus.held_out, self.shape.seq_length, what="The held-out tenth of the text")
        inputs, targets = windows.spread(self.evaluation.iters * self.engine.batch.train)
        return inputs[self.rank :: self.world], targets[self.rank :: self.world]

    def train(self, last: int, progress: Progress, on_step: Callable[[StepRecord], None]) -> None:
        """Train up to and including step `last`, with evaluations on the way and at the end.

        Raises ConfigError if the engine is at step `last` or beyond it.
        """
        first = self.engine.global_steps + 1
        if first > last:
            raise ConfigError(
                f"Step {first - 1} is done, and training is to end with step {last}. Give a larger --train-iters."
            )
        self.engine.train()
        self.meter.start()
        for step in range(first, last + 1):
            began = self._clock()
            loss = self._step(step, last)
            evaluates = self.evaluation.is_due(step, last)
            if evaluates:
                self.engine.settle()  # all transfers of the step belong in its record
            record = self.meter.finish_step(step, loss)
            self.losses.append((step, record.loss))
            on_step(record)
            progress.update(record)
            self._step_seconds.append(self._clock() - began)
            if evaluates:
                self._evaluate(step, progress)
                self.meter.start()

    def _evaluate(self, step: int, progress: Progress) -> None:
        progress.doing("evaluating")
        began = self._clock()
        self.held_out_losses.append((step, self.measure()))
        self._evaluation_seconds = self._clock() - began
        progress.held_out(self.held_out_losses[-1][1])

    def choose_steps(
        self, progress: Progress, on_step: Callable[[StepRecord], None], *, prompts: int = 0, sample: int = 0
    ) -> int:
        """Train the first `MEASURED_STEPS` steps of a new model and return the number of steps that fit in the time.

        prompts, sample: number of prompts and of bytes after each that will be sampled in the end. Every rank returns
        rank 0's choice, since ranks must run the same steps and each measures other seconds.
        """
        start_up = self._clock()
        self.train(MEASURED_STEPS, progress, on_step)
        progress.doing("timing the sample")
        # Saving and drawing depend on the machine as starting does (imports, one pass over all states), so take that.
        closing = start_up + self._evaluation_seconds + sample * self._seconds_per_byte(prompts if sample else 0)
        interval = self.evaluation.interval
        evaluations = self._evaluation_seconds / interval if interval else 0.0
        costs = Costs(self._clock(), step_seconds(self._step_seconds) + evaluations, closing)
        done, most = self.engine.global_steps, max_steps(len(self.text.tokens), self.meter.tokens_per_step)
        steps = self._from_rank_0(choose_steps(costs, done=done, most=most))
        progress.set_steps(steps)
        progress.say(show_choice(steps, costs, done=done, most=most))
        return steps

    def _seconds_per_byte(self, prompts: int) -> float:
        """Duration of a sampled byte after a whole sequence, where it takes longest; 0 without prompts."""
        if not prompts:
            return 0.0
        texts, measured = [" " * self.shape.seq_length] * prompts, 3
        self.sample(texts, 1)  # the first one of a shape takes longer
        began = self._clock()
        self.sample(texts, measured)
        return (self._clock() - began) / measured

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on in the text after a load. state: the client_state of a checkpoint or a commit."""
        self.position = int(state.get("position", self.engine.global_steps * self.engine.batch.train))

    def client_state(self, last: int) -> dict[str, Any]:
        """Return the client_state of a checkpoint. last: the step that training is to end with."""
        return {"train_iters": last, "position": self.position}

    def _step(self, step: int, last: int) -> float:
        """One optimizer step; the mean loss of this rank's samples. Which they are depends on `position` only."""
        batch, total = self.engine.batch, 0.0
        start, self.position = self.position, self.position + batch.train
        for number in range(batch.accumulation):
            first = start + (number * self.world + self.rank) * batch.micro
            inputs, targets = self.text.batch(first, batch.micro)
            loss = self.engine(inputs.to(self.device), targets.to(self.device))
            self.engine.backward(loss)
            if self._durable and number == batch.accumulation - 1:
                record = self.meter.measure(step, (total + loss.item()) / batch.accumulation)
                self.engine.step(client_state={**self.client_state(last), "record": asdict(record)})
            else:
                self.engine.step()
            total += loss.item()
        return total / batch.accumulation

    @torch.no_grad()
    def measure(self) -> float:
        """The loss on held-out text, in nats."""
        if self._held_out is None:
            raise ConfigError("The evaluation has 0 batches. Give a larger --eval-iters.")
        self.engine.eval()
        total, rows, micro = 0.0, len(self._held_out[0]), self.engine.batch.micro
        for start in range(0, rows, micro):
            inputs, targets = (t[start : start + micro].to(self.device) for t in self._held_out)
            total += self.engine(inputs, targets).item() * len(inputs)
        self.engine.settle()
        self.engine.train()
        sums = self._sum_over_ranks(torch.tensor([total, rows], dtype=torch.float64))
        return float(sums[0] / sums[1])

    def sample(self, prompts: Sequence[str], tokens: int, temperature: float = 0.6, top_k: int = 40) -> list[str]:
        """Each prompt (all of one length in bytes) and the `tokens` that the model writes after it, as text.

        The prompts go through the model together, since each token needs every parameter. Every rank gets the same.
        """
        self.engine.eval()
        ids = torch.cat([to_tokens(prompt) for prompt in prompts]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        ids = generate(self.engine, ids, tokens, seq_length=self.shape.seq_length, temperature=temperature,
                       top_k=top_k, generator=generator)  # fmt: skip
        self.engine.train()
        return [to_text(row) for row in ids]

    def last_losses(self) -> dict[str, float]:
        """Return the training loss, a mean over ten steps since batches differ, and the held-out loss, by name."""
        recent = [loss for _, loss in self.losses[-10:]]
        losses = {f"last {len(recent)} batches": sum(recent) / len(recent)} if recent else {}
        return {**losses, "held-out text": self.held_out_losses[-1][1]} if self.held_out_losses else losses

    def tier_bytes(self) -> dict[str, int]:
        """Bytes of each tier, of all ranks together."""
        tiers = self.engine.ledger.tier_bytes()
        sums = self._sum_over_ranks(torch.tensor(list(tiers.values()), dtype=torch.float64))
        return {tier: int(count) for tier, count in zip(tiers, sums.tolist(), strict=True)}

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def _from_rank_0(self, value: int) -> int:
        shared = torch.tensor([value], device=self.device)
        if self.world > 1:
            dist.broadcast(shared, src=0)
        return int(shared.item())


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    ids: Tensor,
    max_new_tokens: int,
    *,
    seq_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`ids` (B, T) followed by `max_new_tokens` sampled ones: (B, T + max_new_tokens).

    `model` maps (B, T) to logits (B, T, V): a `GPT2`, or an engine around one. It sees the last `seq_length` tokens.
    `temperature` 0 takes the likeliest token; `top_k` samples from the k likeliest only.
    """
    for _ in range(max_new_tokens):
        logits = model(ids[:, -seq_length:])[:, -1].float()
        if temperature == 0.0:
            following = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, following), dim=1)
    return ids

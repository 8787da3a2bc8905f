"""Code of the ranks in test_inference.py."""

from __future__ import annotations

from typing import Any

import torch

import infinity
from infinity.errors import UsageError
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.hugging_face import gpt2, llama
from support.models import Stack, seeded, token_batches

MAKERS = {"gpt2": gpt2, "llama": llama}
EOS = 3


def prompt_of(rank: int) -> torch.Tensor:
    """(1, 3 + rank) tokens; no two ranks have the same."""
    return torch.randint(4, 60, (1, 3 + rank), generator=torch.Generator().manual_seed(rank))


def said(generate: Any, rank: int, **how: Any) -> list[int]:
    """Ranks stop after different numbers of tokens."""
    prompt = prompt_of(rank)
    torch.manual_seed(rank)
    mask = torch.ones_like(prompt)
    tokens = generate(prompt, attention_mask=mask, max_new_tokens=3 + 2 * rank, pad_token_id=0, eos_token_id=EOS, **how)
    out: list[int] = tokens[0].tolist()
    return out


def generated(rank: int, *, folder: str, name: str, param: str, **how: Any) -> dict[str, Any]:
    """By an engine, and by the plain model."""
    config = engine_config(param=param, folder=folder, unit_size=60_000, prefetch_bytes=30_000)
    expected = said(seeded(MAKERS[name]).eval().generate, rank, **how)  # type: ignore[operator]
    with infinity.init_inference(seeded(MAKERS[name]), config, device=CpuDevice()) as engine:
        texts = [said(engine.generate, rank, **how) for _ in range(2)]
        texts.append(said(engine.module.generate, rank, synced_gpus=True, **how))  # type: ignore[operator]
        gathered = engine.ledger.snapshot().all_gather_bytes
        shards = [unit.layout.shard_numel / unit.layout.numel for unit in engine.units]
    return {"texts": texts, "expected": expected, "gathered": gathered, "shards": set(shards)}


def forwards(rank: int, *, folder: str, stage: int, counts: list[int]) -> list[bool]:
    """counts: how many batches each rank runs; whether each result is the plain model's."""
    param = "nvme" if stage == 3 else "none"
    config = engine_config(param=param, optim="none", folder=folder, stage=stage, prefetch_bytes=0)
    reference, same = seeded(Stack), []
    with infinity.init_inference(seeded(Stack), config, device=CpuDevice()) as engine, torch.no_grad():
        for batch in token_batches(counts[rank], seed=rank):
            same.append(torch.equal(engine(*batch), reference(*batch)))
        assert (engine.ledger.snapshot().all_gather_bytes > 0) == (stage == 3)
        try:
            engine.backward(torch.ones(()))
        except UsageError:
            same.append(True)
    return same

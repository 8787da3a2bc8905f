"""A short training of a tiny model in a process of its own, with or without a fault."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import infinity
from faults.armed import STEPS, Armed, Counts
from faults.cases import Fault, Setting
from infinity.tiers.device import CpuDevice

VOCABULARY = 29
SECONDS_SILENT = 2.0
"""infinity.rank_timeout of trainings in which a rank hangs."""


class Tiny(nn.Module):
    """Tokens and targets, both int64 (batch, length) → mean cross entropy. Has dropout and a buffer that changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, VOCABULARY)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.float().mean()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def config(setting: Setting, folder: str, *, silent: float = 30.0) -> dict[str, Any]:
    """Return the configuration of a training with its files in `folder`."""
    low = setting.precision != "fp32"
    section: dict[str, Any] = {
        "unit_size": "30KB",
        "tile_size": 4096,
        "cache_bytes": 0,
        "adam_threads": 1,
        "debug": True,
    }
    section |= {"update": setting.update, "durable": setting.durable, "rank_timeout": silent}
    section |= {"moments": "8bit"} if setting.precision == "bf16, 8 bit" else {}
    section |= {"master": "fp32"} if setting.precision == "bf16, fp32 masters" else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": 0.5 if setting.clips else 0.0,
        "steps_per_print": 0,
        "bf16": {"enabled": low},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": setting.param, "nvme_path": folder},
            "offload_optimizer": {"device": setting.optim, "nvme_path": folder},
        },
        "aio": {"checksum": setting.checksum, "single_submit": False, "block_size": 4096},
        "infinity": section,
    }


def batch(step: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))
    return tokens[:, :-1], tokens[:, 1:]


STACKS_AFTER = 100
"""Seconds after which a process tells its stacks."""
SAVED = "third"
"""Tag of the checkpoint after the third step."""


def train(
    setting: Setting, fault: Fault | None, counts: Counts, rank: int, work: str, attempt: int, loads: bool = False
) -> None:
    """Train, and write the result to WORK/said-ATTEMPT-RANK.json: an error, or a digest and counts.

    Each step's loss is a line of WORK/losses-RANK. fault: on one rank. counts: of an undisturbed training. loads: go
    on from the checkpoint in WORK/saved.
    """
    faulthandler.enable()
    with open(f"{work}/output-{attempt}-{rank}", "w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    faulthandler.dump_traceback_later(STACKS_AFTER)
    said: dict[str, Any] = {"begun": time.time()}
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)  # oneDNN crashes without memory, in GELU's backward in bf16
    try:
        run(setting, fault, counts, rank, work, f"{work}/meeting-{attempt}", loads, said)
    except BaseException as error:  # noqa: BLE001 - judged by the parent
        traceback.print_exc()
        said["error"] = f"{type(error).__name__}: {error}"
    part = Path(f"{work}/said-{attempt}-{rank}.part")
    part.write_text(json.dumps(said))
    part.rename(part.with_suffix(".json"))
    sys.stdout.flush()


def run(
    setting: Setting,
    fault: Fault | None,
    counts: Counts,
    rank: int,
    work: str,
    meeting: str,
    loads: bool,
    said: dict[str, Any],
) -> None:
    armed = Armed(fault if fault is not None and fault.rank == rank else None, counts, f"{work}/files")
    if setting.ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=setting.ranks,
            timeout=timedelta(seconds=20),
        )
    Path(f"{meeting}-{rank}").touch()
    said["met"] = time.time()
    torch.manual_seed(0)
    keys = config(
        setting, f"{work}/files", silent=SECONDS_SILENT if fault is not None and fault.kind == "hang" else 30.0
    )
    engine = infinity.initialize(model=Tiny(), config=keys, device=CpuDevice())[0]
    try:
        torch.manual_seed(5 + rank)
        state = (engine.resume() if setting.durable else None) or {"next": 0}
        if loads:
            _, state = engine.load_checkpoint(f"{work}/saved")
        said["resumed"] = time.time()
        said["first"] = state["next"]
        for step in range(state["next"], STEPS):
            armed.at_step(step)
            total = 0.0
            for part in range(setting.accumulation):
                loss = engine(*batch(step, part, rank))
                engine.backward(loss)
                total += loss.item()
                if part + 1 == setting.accumulation:
                    with open(f"{work}/losses-{rank}", "a") as file:
                        file.write(f"{step} {total.hex()}\n")
                engine.step(client_state={"next": step + 1})
            if setting.saves and step == 2:
                background = setting.saves == "in the background"
                engine.save_checkpoint(f"{work}/saved", SAVED, {"next": step + 1}, background=background)
        values = engine.state_dict()
        said["digest"] = digest(values)
        engine.close()
    except BaseException:
        armed.disarm()
        if fault is None or fault.closes:
            engine.close()
        raise
    said["counts"] = armed.counted()
    said["ended"] = time.time()


def digest(values: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names and bytes."""
    found = hashlib.sha256()
    for name, value in values.items():
        found.update(name.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

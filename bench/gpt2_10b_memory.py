"""Bytes that a GPT-2 takes of each memory, from its plan, without allocating; and the limit on the device's memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infinity.comm.communicator import Communicator
from infinity.engine.optimizer.unit_optimizer import param_groups
from infinity.engine.wiring import plan_model
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind
from infinity.tiers.available import available_memory
from infinity.tiers.device import Device

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.plan.plan import Plan


@dataclass(frozen=True)
class Need:
    """Bytes needed of one memory, beside those available."""

    memory: str
    """"device", "host" or "nvme"."""
    needed: int
    available: int

    @property
    def missing(self) -> int:
        return max(0, self.needed - self.available)

    def __str__(self) -> str:
        return f"{show_bytes(self.missing)} more on {self.memory}: {self.needed:,} bytes of {self.available:,}"


def plan_of(shape: GPT2Config, config: Config, device: Device) -> Plan:
    """Return the plan of an engine, from a model without values."""
    with torch.device("meta"):
        model = GPT2(shape)
    return plan_model(model, config, param_groups(model, None), device, Communicator(device)).plan


def activation_bytes(shape: GPT2Config, batch: int, itemsize: int) -> int:
    """Return the bytes of activations of `batch` sequences when backward starts: the inputs of all blocks, the logits
    and their gradient. The peak is at least that; recomputing a block and temporary tensors are not counted.
    """
    tokens = batch * shape.seq_length
    return itemsize * tokens * (shape.num_layers * shape.hidden_size + 2 * shape.vocab_size)


def needs(plan: Plan, activations: int, available: dict[str, int]) -> list[Need]:
    """Return what the plan and its activations take of each memory. On the CPU, the device's share is the host's."""
    needed = plan.peak_nbytes()
    needed[TierKind.DEVICE] += activations
    if plan.device.type == "cpu":
        needed[TierKind.HOST] += needed.pop(TierKind.DEVICE)
    return [Need(memory, nbytes, available.get(memory, 0)) for memory, nbytes in needed.items()]


def available_bytes(device: Device, limit: int, nvme_path: Path) -> dict[str, int]:
    """Return the free bytes of each memory. limit: of the device's memory."""
    return {
        "device": min(limit, device.available_bytes()),
        "host": available_memory(),
        "nvme": shutil.disk_usage(_existing(nvme_path)).free,
    }


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())


def enforce(device: Device, limit: int) -> str:
    """Let torch allocate at most `limit` bytes of the device's memory. Returns one line that says so, or why not."""
    total = device.info.nbytes
    if not total:
        return "device memory: this device is the host, so the limit holds for the engine's buffers only"
    if total <= limit:
        return f"device memory: {show_bytes(total)}, less than the limit of {show_bytes(limit)}"
    device.limit(limit)
    return f"device memory: torch may allocate {limit:,} of {total:,} bytes"


def table(rows: Iterator[tuple[str, str, list[Need]]]) -> Iterator[str]:
    """Yield a line for each (placement, moments, needs): bytes of each memory, and those that are missing."""
    for placement, moments, found in rows:
        held = ", ".join(f"{need.memory} {show_bytes(need.needed)}" for need in found)
        missing = "; ".join(str(need) for need in found if need.missing)
        yield f"  {placement:14}  {moments:4}  {held}  {f'refused, needs {missing}' if missing else 'fits'}"

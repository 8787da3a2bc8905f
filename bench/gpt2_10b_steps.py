"""Steps of a GPT-2 and their figures: operations, seconds, exposed time, peaks, and bytes on each link."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

import harness
from gpt2.data import TokenDataset
from infinity.observe.ledger import between
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sizes import show_bytes
from infinity.tiers.accelerator import AcceleratorDevice, default_device
from infinity.tiers.device import Device
from infinity.tiers.transfer import Transfer

if TYPE_CHECKING:
    from infinity.engine.training import TrainingEngine

FORMULA = """\
With B sequences of s tokens, l layers of width h and a vocabulary of V, a step takes 72 B s l h^2 (1 + s/(6h) +
V/(12lh)) operations of the model. Recomputing the blocks adds 24 B s l h^2 (1 + s/(6h)). Attention counts in full, as
in Megatron-LM, although half of it is masked."""


# -- operations --------------------------------------------------------------------------------------------------------


def model_flops(shape: GPT2Config, sequences: int) -> float:
    """Return the operations of a step without recomputation; see `FORMULA`."""
    s, layers, h, v = shape.seq_length, shape.num_layers, shape.hidden_size, shape.vocab_size
    return 72 * sequences * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))


def recomputed_flops(shape: GPT2Config, sequences: int) -> float:
    """Return the operations that recomputing all blocks adds to a step."""
    s, layers, h = shape.seq_length, shape.num_layers, shape.hidden_size
    return 24 * sequences * s * layers * h**2 * (1 + s / (6 * h)) if shape.checkpoint_activations else 0.0


def resident_rate(shape: GPT2Config, batch: int, dtype: torch.dtype, device: Device, steps: int = 4) -> float:
    """Return plain PyTorch's operations a second, those of recomputed blocks too: forward and backward, with everything
    on the device. A few blocks have another share of them than many, so model operations would not compare.
    """
    with torch.device(device.torch_device):
        model = GPT2(shape).to(dtype)
        tokens = torch.randint(0, shape.vocab_size, (batch, shape.seq_length + 1))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        loss.item()
        device.compute_reached().wait()
        seconds.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    operations = model_flops(shape, batch) + recomputed_flops(shape, batch)
    return operations / harness.spread(seconds[1:]).median


# -- training ----------------------------------------------------------------------------------------------------------


class CountingDevice(AcceleratorDevice):
    """Counts the bytes copied to and from the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._lock = threading.Lock()
        self.to_device = self.from_device = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        with self._lock:
            if source.is_cpu and not destination.is_cpu:
                self.to_device += source.nbytes
            elif destination.is_cpu and not source.is_cpu:
                self.from_device += source.nbytes
        return super().copy(destination, source, after=after)


def counted_device() -> Device:
    device = default_device()
    return device if device.torch_device.type == "cpu" else CountingDevice(device.torch_device)


def train(engine: TrainingEngine, text: TokenDataset, steps: int, device: Device) -> Iterator[harness.Result]:
    """Train and yield a record of each step. Its seconds end when the losses of its micro-batches are known."""
    batch, before, waits_before = engine.batch, _counters(engine, device), engine.ledger.waits()
    for step in range(1, steps + 1):
        losses = []
        for number in range(batch.accumulation):
            loss = engine(*text.batch((step - 1) * batch.train + number * batch.micro, batch.micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())  # read at the end, so that the host runs ahead of the device
        mean = torch.stack(losses).double().mean().item()
        now, waits_now = _counters(engine, device), engine.ledger.waits()
        spent, waits = {name: now[name] - before[name] for name in now}, between(waits_before, waits_now)
        before, waits_before = now, waits_now
        yield {
            "step": step,
            "loss": mean,
            **spent,
            "waits": {reason: vars(one) for reason, one in waits.items()},
            "host_peak_bytes": engine.ledger.host_peak_bytes,
            "device_peak_bytes": engine.ledger.device_peak_bytes,
            "skipped_steps": engine.skipped_steps,
        }


def _counters(engine: TrainingEngine, device: Device) -> dict[str, float]:
    now = engine.ledger.snapshot()
    return {
        "seconds": now.seconds,
        "waited": now.wait_seconds,
        "update_seconds": now.update_seconds,
        "nvme_bytes_read": now.nvme_bytes_read,
        "nvme_bytes_written": now.nvme_bytes_written,
        "bytes_to_device": getattr(device, "to_device", 0),
        "bytes_from_device": getattr(device, "from_device", 0),
    }


def waits_text(waits: Mapping[str, Mapping[str, float]]) -> str:
    """Return the reasons with most seconds slept, such as "edits 0.1 s asleep, 0.02 s idle (53 times)"."""
    longest = sorted(waits.items(), key=lambda one: one[1]["slept"], reverse=True)
    shown = [
        f"{reason} {one['slept']:.3f} s asleep, {one['stood_still']:.3f} s idle ({one['count']:.0f} times)"
        for reason, one in longest
        if one["slept"] >= 0.0005
    ]
    return "; ".join(shown) or "none"


def rates(record: harness.Result, shape: GPT2Config, sequences: int) -> harness.Result:
    """Return operations and tokens a second of a step."""
    model = model_flops(shape, sequences)
    return {
        "model_tflops": model / record["seconds"] / 1e12,
        "recomputing_tflops": (model + recomputed_flops(shape, sequences)) / record["seconds"] / 1e12,
        "tokens_per_second": sequences * shape.seq_length / record["seconds"],
    }


def line(record: harness.Result) -> str:
    return (
        f"step {record['step']}: loss {record['loss']:.4f}; {record['seconds']:.3g} s, "
        f"{record['model_tflops']:.3g} TFLOP/s ({record['recomputing_tflops']:.3g} with recomputation), "
        f"{record['tokens_per_second']:.0f} tokens/s; compute stood still {record['waited']:.3g} s for the engine; "
        f"update {record['update_seconds']:.3g} s; "
        f"to device {show_bytes(record['bytes_to_device'])}, from device {show_bytes(record['bytes_from_device'])}, "
        f"nvme read {show_bytes(record['nvme_bytes_read'])}, written {show_bytes(record['nvme_bytes_written'])}; "
        f"peaks: device {show_bytes(record['device_peak_bytes'])}, host {show_bytes(record['host_peak_bytes'])}"
        + (f"; {record['skipped_steps']} steps skipped" if record["skipped_steps"] else "")
        + f"\n  waits: {waits_text(record['waits'])}"
    )

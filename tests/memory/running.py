"""Code of the processes whose memory tests/memory/test_running.py measures."""

from __future__ import annotations

import resource
from typing import Any

import torch

import infinity
from infinity.comm.communicator import Communicator
from infinity.engine.wiring import plan_model
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.tiers.device import CpuDevice
from support.configs import engine_config

TOKENS = torch.arange(32).view(1, 32)


def model(layers: int, width: int = 384) -> GPT2:
    """Return a model on the meta device. By default a block has 1.8 M parameters, 3.5 MB in bf16; backward recomputes
    its activations.
    """
    shape = GPT2Config(
        256, seq_length=32, num_layers=layers, hidden_size=width, num_attention_heads=6, checkpoint_activations=True
    )
    with torch.device("meta"):
        return GPT2(shape)


def config(folder: str, device: str = "nvme", **options: Any) -> Any:
    return engine_config(device, device, folder=folder, bf16=True, unit_size="4MiB", tile_size=1 << 18, moments="8bit",
                         debug=False, micro=1, **options)  # fmt: skip


def planned(layers: int, folder: str, **options: Any) -> int:
    """Return the bytes of memory that the plan of `train` counts. Nothing is allocated."""
    device = CpuDevice()
    module = model(layers)
    groups: list[dict[str, object]] = [{"params": list(module.parameters())}]
    plan = plan_model(module, config(folder, **options), groups, device, Communicator(device)).plan
    held = plan.peak_nbytes()
    return held["device"] + held["host"]


def plain(layers: int) -> None:
    """Run forward and backward of the same model in memory, with its parameters and gradients."""
    module = model(layers).to_empty(device="cpu").to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for _ in range(2):
        module(TOKENS, TOKENS).backward()


def states_of_plain(layers: int) -> int:
    """Return the bytes of parameters and gradients that `plain` holds."""
    return 2 * sum(parameter.numel() * 2 for parameter in model(layers).parameters())


def train(layers: int, folder: str, steps: int = 3, **options: Any) -> None:
    """Train. options: of `config`."""
    with infinity.initialize(model(layers), config(folder, **options), device=CpuDevice())[0] as engine:
        assert len(engine.units) > layers
        for _ in range(steps):
            engine.backward(engine(TOKENS, TOKENS))
            engine.step()
        engine.settle()


def stream(layers: int, folder: str, streams: bool = True, width: int = 384) -> None:
    """Train a step and stream the weights, three times. streams: False: only train."""
    with infinity.initialize(model(layers, width), config(folder), device=CpuDevice())[0] as engine:
        for _ in range(3):
            engine.backward(engine(TOKENS, TOKENS))
            engine.step()
            for _, value in infinity.stream_weights(engine) if streams else ():
                assert value.isfinite().all()
                del value


def two_engines(layers: int) -> None:
    """Construct engines for training and for inference with `auto` budgets, in a limited address space."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), resource.RLIM_INFINITY))
    section = {"device": "nvme", "nvme_path": "."}
    settings = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"offload_param": section, "offload_optimizer": section},
        "infinity": {"memory": {"host": "auto"}},
    }
    with infinity.initialize(model(layers), settings, device=CpuDevice())[0] as engine:
        first, held = engine.parts.plan.budget.host, engine.ledger.tier_bytes()["host"]
        assert held > 150e6  # so the budget keeps states in host memory
        with infinity.init_inference(model(layers), settings, device=CpuDevice()) as reference:
            second = reference.parts.plan.budget.host
            assert first is not None and second is not None
            assert second <= first - held // 2, (first, second, held)  # of what is free, half is for states
            assert all(value.isfinite().all() for _, value in infinity.stream_weights(reference))


def largest_block(layers: int, width: int = 384) -> int:
    """Return the bytes of the largest block's parameters in bf16."""
    return max(2 * sum(p.numel() for p in block.parameters()) for block in model(layers, width).h)


def save_and_load(layers: int, folder: str) -> None:
    """Save and load without training, since the checkpoint has the same size."""
    with infinity.initialize(model(layers), config(folder), device=CpuDevice())[0] as engine:
        engine.save_checkpoint(f"{folder}/{layers}")
        engine.load_checkpoint(f"{folder}/{layers}")


def infer(layers: int, folder: str, device: str = "nvme", saved: bool = True) -> None:
    """Run inference. saved: load the checkpoint of `save_and_load` first."""
    with infinity.init_inference(model(layers), config(folder, device), device=CpuDevice()) as engine:
        if saved:
            engine.load_checkpoint(f"{folder}/{layers}")
        with torch.no_grad():
            for _ in range(3):
                engine(TOKENS)
        for _ in engine.stream_state_dict():
            pass


def train_tiled(outputs: int, folder: str) -> None:
    """Train, save and load a layer of 1024 × `outputs` in tiles of 8 MiB in bf16."""
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Linear(1024, outputs, bias=False))
    infinity.nn.tile(module, "16MiB")
    engine = infinity.initialize(model=module, config=config(folder), device=CpuDevice())[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.close()


def save_activations(layers: int, folder: str, batch: int = 4, device: str = "nvme") -> None:
    """Train without recomputation: a block saves 16 MB for a batch of 4."""
    shape = GPT2Config(256, seq_length=256, num_layers=layers, hidden_size=256, num_attention_heads=8)
    with torch.device("meta"):
        module = GPT2(shape)
    section = {"device": device, "nvme_path": folder, "memory_bytes": "48MiB"}
    tokens = torch.arange(batch * 256).view(batch, 256) % 256
    settings = engine_config("nvme", "nvme", folder=folder, unit_size="4MiB", tile_size=1 << 18, moments="8bit",
                             debug=False, micro=batch, activations=section)  # fmt: skip
    with infinity.initialize(module, settings, device=CpuDevice())[0] as engine:
        for _ in range(2):
            engine.backward(engine(tokens, tokens))
            engine.step()

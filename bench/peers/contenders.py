"""The contenders of `run.py`, beyond those of `zero_contenders.py`: DeepSpeed and torchao's CPUOffloadOptimizer.

All train the same GPT-2 in bf16, update fp32 masters with AdamW, and do not clip gradients.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import training
from zero_contenders import Contender, InfinityLoop, TorchLoop, zero_config


class Loop(Protocol):
    """Training of one contender."""

    def step(self, tokens: Any, targets: Any) -> Any:
        """A whole step; the loss, detached. tokens, targets: (batch, sequence), int64."""


@dataclass(frozen=True)
class Peer:
    """A contender. requirement: what pip installs it by; "" for this project and torch."""

    title: str
    make: Callable[[argparse.Namespace], Loop]
    requirement: str = ""

    @property
    def package(self) -> str:
        return self.requirement.partition("==")[0]


# -- this project and torch --------------------------------------------------------------------------------------------


def make_model(args: argparse.Namespace) -> Any:
    import torch

    from infinity.sim.gpt2 import GPT2

    torch.manual_seed(0)
    return GPT2(training.gpt2_of(args.shape))


def make_plain(args: argparse.Namespace) -> Loop:
    return TorchLoop(args, Contender("plain", "plain", 0), make_model(args))


def make_infinity(args: argparse.Namespace, place: str) -> Loop:
    import infinity

    contender = Contender(place, "infinity", 3, place, place)
    with infinity.Init(zero_config(args, contender)):
        model = make_model(args)
    return InfinityLoop(args, contender, model)


def make_fsdp2(args: argparse.Namespace) -> Loop:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{args.nvme_path}/meeting", rank=0, world_size=1)
    return TorchLoop(args, Contender("FSDP2", "fsdp2", 3, "cpu", "cpu"), make_model(args))


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def job_environment(**variables: str) -> Mapping[str, str]:
    """Variables of a job of one process on the CPU, and `variables`."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    return {**os.environ, **single, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", **variables}


class DeepSpeedLoop:
    """A script for DeepSpeed."""

    def __init__(self, module: str, model_config: Any, config: Mapping[str, Any]) -> None:
        """module: `deepspeed` or one with its interface. model_config: a GPT2Config."""
        deepspeed = importlib.import_module(module)
        import torch

        from infinity.sim.gpt2 import GPT2

        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT2(model_config)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def make_deepspeed(args: argparse.Namespace, place: str) -> Loop:
    config = zero_config(args, Contender(place, "deepspeed", 3, place, place))
    return DeepSpeedLoop("deepspeed", training.gpt2_of(args.shape), config)


# -- torchao -----------------------------------------------------------------------------------------------------------


class TorchaoLoop:
    """fp32 parameters, which autocast converts to bf16, and torchao's CPUOffloadOptimizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from torchao.optim import CPUOffloadOptimizer

        self.model = make_model(args)
        self.autocast = torch.autocast(args.device, torch.bfloat16)
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, weight_decay=0.01
        )

    def step(self, tokens: Any, targets: Any) -> Any:
        with self.autocast:
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


PEERS = {
    "plain": Peer("plain PyTorch, in memory", make_plain),
    "infinity cpu": Peer("Infinity, all in host memory", partial(make_infinity, place="cpu")),
    "infinity nvme": Peer("Infinity, all on NVMe", partial(make_infinity, place="nvme")),
    "deepspeed cpu": Peer("DeepSpeed, all in host memory", partial(make_deepspeed, place="cpu"), "deepspeed==0.19.8"),
    "deepspeed nvme": Peer("DeepSpeed, all on NVMe", partial(make_deepspeed, place="nvme"), "deepspeed==0.19.8"),
    "fsdp2 cpu": Peer("FSDP2, CPUOffloadPolicy", make_fsdp2),
    "torchao": Peer("torchao, CPUOffloadOptimizer", TorchaoLoop, "torchao==0.18.0"),
}

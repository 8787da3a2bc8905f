"""The contenders of `zero.py`: DistributedDataParallel, FSDP2 and Infinity, training the same GPT-2 on gloo ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Protocol

import training


@dataclass(frozen=True)
class Contender:
    """A contender. against: the peer that its time is compared with."""

    title: str
    kind: str
    stage: int
    offload: bool = False
    prefetch: str | int = "auto"
    against: str = ""


CONTENDERS = {
    "ddp": Contender("DistributedDataParallel", "ddp", 0),
    "fsdp2 kept": Contender("FSDP2, reshard_after_forward=False", "fsdp2", 2),
    "fsdp2": Contender("FSDP2", "fsdp2", 3),
    "fsdp2 cpu": Contender("FSDP2, CPUOffloadPolicy", "fsdp2", 3, offload=True),
    "infinity stage 0": Contender("Infinity, stage 0", "infinity", 0, against="ddp"),
    "infinity stage 1": Contender("Infinity, stage 1", "infinity", 1, against="fsdp2 kept"),
    "infinity stage 2": Contender("Infinity, stage 2", "infinity", 2, against="fsdp2 kept"),
    "infinity stage 3": Contender("Infinity, stage 3", "infinity", 3, against="fsdp2"),
    "infinity stage 3, no prefetch": Contender(
        "Infinity, stage 3, prefetch_bytes 0", "infinity", 3, prefetch=0, against="fsdp2"
    ),
    "infinity stage 3 cpu": Contender(
        "Infinity, stage 3, all on cpu", "infinity", 3, offload=True, against="fsdp2 cpu"
    ),
}


class Loop(Protocol):
    """One rank's training of one contender."""

    def step(self, tokens: Any, targets: Any) -> Any:
        """A whole step; the loss, detached. tokens, targets: (batch, sequence), int64."""

    def traffic(self) -> dict[str, int]:
        """Bytes of whole tensors that collectives were issued for so far; empty if nothing is known of them."""

    def facts(self) -> dict[str, int]:
        """Units, and elements of their flat tensors, padding included; empty if nothing is known of them."""


def make_model(args: argparse.Namespace) -> Any:
    import torch

    torch.manual_seed(0)
    return training.make_gpt2(args)


def make_loop(args: argparse.Namespace, contender: Contender) -> Loop:
    return InfinityLoop(args, contender) if contender.kind == "infinity" else TorchLoop(args, contender)


class TorchLoop:
    """torch's own: DistributedDataParallel or FSDP2, and the fused AdamW."""

    def __init__(self, args: argparse.Namespace, contender: Contender) -> None:
        import torch

        self.model = make_model(args)
        self.masters: training.Masters | None = None
        if contender.kind == "ddp":
            if args.dtype == "bf16":
                self.masters = training.Masters(self.model)
            self.run = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            self._shard(args, contender)
            self.run = self.model
        trained = self.masters.values if self.masters else list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=True)

    def _shard(self, args: argparse.Namespace, contender: Contender) -> None:
        """Wrap block by block, then the root."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (args.ranks,))}
        if contender.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if args.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kept = contender.stage < 3
        for block in self.model.h:
            fully_shard(block, reshard_after_forward=not kept, **options)
        fully_shard(self.model, **(options | ({"reshard_after_forward": False} if kept else {})))

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.run(tokens, targets)
        loss.backward()
        if self.masters:
            self.masters.take_gradients()
        self.optimizer.step()
        if self.masters:
            self.masters.write_back()
        self.optimizer.zero_grad()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, int]:
        return {}


class InfinityLoop:
    """Infinity in one of its stages."""

    def __init__(self, args: argparse.Namespace, contender: Contender) -> None:
        import infinity

        offload = {"device": "cpu" if contender.offload else "none"}
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "bf16": {"enabled": args.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": contender.stage,
                "offload_param": offload if contender.stage == 3 else {"device": "none"},
                "offload_optimizer": offload,
            },
            "infinity": {"prefetch_bytes": contender.prefetch},
        }
        self.engine, *_ = infinity.initialize(model=make_model(args), config=config)

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(vars(self.engine.ranks.traffic))

    def facts(self) -> dict[str, int]:
        return {"units": len(self.engine.units), "numel": sum(unit.layout.numel for unit in self.engine.units)}

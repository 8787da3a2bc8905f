"""Contenders of `zero.py`, `device_step.py` and `peers/`: plain PyTorch, DistributedDataParallel, FSDP2 and Infinity.

All train the same GPT-2, on `args.device`, clipping the gradient's norm to `args.clip` (0: no clipping).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Protocol

import training


@dataclass(frozen=True)
class Contender:
    """A contender. param, optim: where these states live; FSDP2 keeps all or none on the CPU.

    against: the peer that its time is compared with.
    """

    title: str
    kind: str
    stage: int
    param: str = "none"
    optim: str = "none"
    prefetch: str | int = "auto"
    against: str = ""


CONTENDERS = {
    "ddp": Contender("DistributedDataParallel", "ddp", 0),
    "fsdp2 kept": Contender("FSDP2, reshard_after_forward=False", "fsdp2", 2),
    "fsdp2": Contender("FSDP2", "fsdp2", 3),
    "fsdp2 cpu": Contender("FSDP2, CPUOffloadPolicy", "fsdp2", 3, "cpu", "cpu"),
    "infinity stage 0": Contender("Infinity, stage 0", "infinity", 0, against="ddp"),
    "infinity stage 1": Contender("Infinity, stage 1", "infinity", 1, against="fsdp2 kept"),
    "infinity stage 2": Contender("Infinity, stage 2", "infinity", 2, against="fsdp2 kept"),
    "infinity stage 3": Contender("Infinity, stage 3", "infinity", 3, against="fsdp2"),
    "infinity stage 3, no prefetch": Contender(
        "Infinity, stage 3, prefetch_bytes 0", "infinity", 3, prefetch=0, against="fsdp2"
    ),
    "infinity stage 3 cpu": Contender(
        "Infinity, stage 3, all on cpu", "infinity", 3, "cpu", "cpu", against="fsdp2 cpu"
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
    kind = InfinityLoop if contender.kind == "infinity" else TorchLoop
    return kind(args, contender, make_model(args))


class TorchLoop:
    """torch's own: DistributedDataParallel, FSDP2 or neither, and the fused AdamW."""

    def __init__(self, args: argparse.Namespace, contender: Contender, model: Any) -> None:
        import torch

        self.model = model
        self.masters: training.Masters | None = None
        if contender.kind == "fsdp2":
            self._shard(args, contender)
            self.run = self.model
        else:
            self.model.to(args.device)
            if args.dtype == "bf16":
                self.masters = training.Masters(self.model)
            self.run = self.model
            if contender.kind == "ddp":
                self.run = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.clip = args.clip
        self.trained = self.masters.values if self.masters else list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.01, fused=True)

    def _shard(self, args: argparse.Namespace, contender: Contender) -> None:
        """Wrap block by block, then the root."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(args.device, (args.ranks,))}
        if contender.optim == "cpu":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=args.device != "cpu")
        if args.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kept = contender.stage < 3
        for block in self.model.h:
            fully_shard(block, reshard_after_forward=not kept, **options)
        fully_shard(self.model, **(options | ({"reshard_after_forward": False} if kept else {})))

    def step(self, tokens: Any, targets: Any) -> Any:
        import torch

        loss = self.run(tokens, targets)
        loss.backward()
        if self.masters:
            self.masters.take_gradients()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.optimizer.step()
        if self.masters:
            self.masters.write_back()
        self.optimizer.zero_grad()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, int]:
        return {}


def zero_config(args: argparse.Namespace, contender: Contender) -> dict[str, Any]:
    """The configuration of a contender in DeepSpeed's keys."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": contender.stage,
            "offload_param": _place(args, contender.param),
            "offload_optimizer": _place(args, contender.optim),
        },
    }


def _place(args: argparse.Namespace, device: str) -> dict[str, Any]:
    if device == "nvme":
        return {"device": device, "nvme_path": str(args.nvme_path)}
    return {"device": device, "pin_memory": device == "cpu" and args.device != "cpu"}


class InfinityLoop:
    """Infinity in one of its stages."""

    def __init__(self, args: argparse.Namespace, contender: Contender, model: Any) -> None:
        import infinity
        from gpt2_10b_steps import counted_device

        given = {"prefetch_bytes": contender.prefetch, "moments": getattr(args, "moments", "fp32")}
        config = {**zero_config(args, contender), "infinity": given}
        self.device = counted_device()
        self.engine, *_ = infinity.initialize(model=model, config=config, device=self.device)

    def step(self, tokens: Any, targets: Any) -> Any:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(vars(self.engine.ranks.traffic))

    def facts(self) -> dict[str, int]:
        return {"units": len(self.engine.units), "numel": sum(unit.layout.numel for unit in self.engine.units)}

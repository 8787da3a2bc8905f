"""One interface to the plain loop and to the engine, against which `fuzz.loops` is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity
from fuzz.case import Case, Loop, Setting
from fuzz.model import Net, build
from fuzz.optimizers import PARAMS, Masters, plain_optimizer
from infinity.comm.communicator import Communicator
from infinity.config import Config
from infinity.config.infinity import Memory
from infinity.engine.training import TrainingEngine
from infinity.engine.wiring import plan_model
from infinity.tiers import open_tiers
from infinity.tiers.device import CpuDevice, Device
from support.late_device import LateDevice
from support.late_disk import LateNvmeTier

WARMUP = 4
LOSS_SCALE = 256.0
"""Loss scale of fp16."""


class Trainer(Protocol):
    """Interface of a training loop. `step` does nothing before the last backward of a step, as the engine's does."""

    model: Net
    optimizer: torch.optim.Optimizer

    def forward(self, *args: Any) -> torch.Tensor: ...
    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...
    def backward(self, loss: torch.Tensor) -> None: ...
    def step(self) -> None: ...
    def drop(self) -> None: ...
    def master(self, parameter: nn.Parameter) -> torch.Tensor: ...
    def state(self) -> dict[str, torch.Tensor]: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]: ...
    def resume(self) -> None:
        """Save a checkpoint, construct everything anew as the next process would, and load it."""
        ...

    def keep(self, how: str) -> list[torch.Tensor]:
        """Return the tensors that the loop keeps, taken before and after the engine is made."""
        ...


def keep_before(model: nn.Module, how: str) -> list[torch.Tensor]:
    """Return tensors of the model, taken before an engine is made."""
    if how == "views before":
        return [p.view(-1) for p in model.parameters() if p.is_contiguous()]
    if how == "detached before":
        return [p.detach() for p in model.parameters()]
    if how == "named":
        return list(dict(model.named_parameters()).values())
    return list(model.parameters()) if how == "parameters" else []


def keep_after(model: nn.Module, how: str, contiguous: list[bool]) -> list[torch.Tensor]:
    """Return tensors of the model, taken while an engine has it. contiguous: of each parameter, without an engine,
    which makes all contiguous.
    """
    few = list(model.parameters())[:4]
    if how == "views":
        return [p.view(-1) for p, flat in zip(few, contiguous, strict=False) if flat]
    return [p.detach() for p in few] if how == "detached" else []


def contiguity(model: nn.Module) -> list[bool]:
    return [p.is_contiguous() for p in model.parameters()]


def backwards_per_step(loop: Loop) -> int:
    """Return gradient_accumulation_steps, which counts backwards, for this loop."""
    if loop.backward == "twice uncounted":
        return 1
    return loop.accumulation * (2 if loop.backward in ("twice", "two losses") else 1)


def parameter_groups(model: nn.Module, loop: Loop) -> list[dict[str, Any]]:
    """One group of all parameters, or two that differ in learning rate and decay."""
    parameters = list(model.parameters())
    if loop.groups == 1:
        return [{"params": parameters}]
    params = PARAMS[loop.optimizer]
    second = {"params": parameters[1::2], "lr": 0.3 * params["lr"], "weight_decay": 0.0}
    return [{"params": parameters[::2]}, second] if parameters[1::2] else [{"params": parameters}]


class PlainTrainer:
    """Plain PyTorch, with fp32 masters of 16-bit parameters. exact: use the engine's update kernels instead of torch's
    optimizer.
    """

    def __init__(self, model: Net, case: Case, *, exact: bool = False) -> None:
        loop = case.loop
        self.model, self.exact, self.clip = model, exact, loop.clip
        self.loss_scale = LOSS_SCALE if loop.dtype == "fp16" else 1.0
        self.masters = Masters(model, self.loss_scale) if loop.dtype != "fp32" else None
        self.factor = self.loss_scale / backwards_per_step(loop)
        self.wanted, self.backwards = backwards_per_step(loop), 0
        trained = [
            {**group, "params": [self._trained(p) for p in group["params"] if p.dtype == model.dtype]}
            for group in parameter_groups(model, loop)
        ]
        self.optimizer = plain_optimizer(loop.optimizer, trained, loop.clip, exact=exact)
        self.scheduler: LambdaLR | None = None
        if loop.schedule == "config":  # as WarmupLR, linear
            self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, step / WARMUP))

    def _trained(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.masters[parameter] if self.masters is not None else parameter

    def forward(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.model(*args)
        return out

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        if self.masters is not None:
            self.masters.collect()
        return loss if self.factor == 1.0 else loss * self.factor

    def backward(self, loss: torch.Tensor) -> None:
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        if self.backwards < self.wanted:
            return
        if self.masters is not None:
            self.masters.collect()
            self.masters.adopt()
        if self.clip and not self.exact:
            nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], self.clip)
        self.optimizer.step()
        if self.masters is not None:
            self.masters.publish()
        if self.scheduler is not None:
            self.scheduler.step()
        self.drop()

    def drop(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.masters is not None:
            self.masters.drop()
        self.backwards = 0

    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.masters is not None and parameter.requires_grad:
            self.masters.adopt()
            return self.masters[parameter].detach()
        return parameter.detach().float()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def resume(self) -> None:
        """Do nothing: plain training goes on."""

    def keep(self, how: str) -> list[torch.Tensor]:
        return keep_before(self.model, how) or keep_after(self.model, how, contiguity(self.model))


class EngineTrainer:
    """The engine, as a user calls it. The caller closes it."""

    def __init__(self, case: Case, setting: Setting, folder: Path) -> None:
        self._case, self._setting, self._folder = case, setting, folder
        self._open()

    def _open(self) -> None:
        self.model = build(self._case)
        self._kept = keep_before(self.model, self._case.loop.kept)
        contiguous = contiguity(self.model)
        self.engine = open_engine(self.model, self._case, self._setting, self._folder)
        self.optimizer: torch.optim.Optimizer = self.engine.optimizer
        self._kept = self._kept or keep_after(self.model, self._case.loop.kept, contiguous)

    def keep(self, how: str) -> list[torch.Tensor]:
        return self._kept

    def resume(self) -> None:
        self.engine.save_checkpoint(self._folder / "checkpoints")
        self.engine.close()
        if self._setting.host is not None:
            self._setting = replace(self._setting, host=1.0 - self._setting.host)
        if self._setting.device is not None:
            self._setting = replace(self._setting, device=1.0 - self._setting.device)
        self._open()
        self.engine.load_checkpoint(self._folder / "checkpoints")

    def no_sync(self) -> AbstractContextManager[None]:
        return self.engine.no_sync()

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return infinity.GatheredParameters(parameters, modifier_rank=0)

    def forward(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.engine(*args)
        return out

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.engine.scale(loss)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def drop(self) -> None:
        self.engine.drop_gradients()

    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        return infinity.get_full_fp32_param(parameter)

    def state(self) -> dict[str, torch.Tensor]:
        return self.engine.state_dict()


def config_of(case: Case, setting: Setting, folder: Path) -> Config:
    """The engine's config for a case in one of its settings."""
    loop = case.loop
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": backwards_per_step(loop),
        "gradient_clipping": loop.clip,
        "steps_per_print": 0,
        "bf16": {"enabled": loop.dtype == "bf16"},
        "fp16": {"enabled": loop.dtype == "fp16", "loss_scale": LOSS_SCALE},
        "optimizer": {"type": loop.optimizer.split()[0], "params": PARAMS[loop.optimizer]},
        "zero_optimization": {
            "stage": setting.stage,
            "offload_param": {"device": setting.param, "nvme_path": str(folder)},
            "offload_optimizer": {"device": setting.optim, "nvme_path": str(folder)},
        },
        "infinity": {
            "unit_size": setting.unit_size,
            "tile_size": 4096,
            "prefetch_bytes": setting.prefetch,
            "cache_bytes": setting.cache,
            "update": setting.update,
            "debug": setting.debug,
            "adam_threads": 1,
        },
    }
    if loop.schedule == "config":
        params = {"warmup_num_steps": WARMUP, "warmup_type": "linear"}
        given["scheduler"] = {"type": "WarmupLR", "params": params}
    return Config.load(given)


def open_engine(model: Net, case: Case, setting: Setting, folder: Path) -> TrainingEngine:
    """An engine for the case, with slow devices where the setting asks for them."""
    device = LateDevice(delay=0.01) if setting.late in ("device", "both") else CpuDevice()
    tier = open_tiers.NvmeTier
    if setting.late in ("disk", "both"):
        open_tiers.NvmeTier = LateNvmeTier  # type: ignore[misc]
    try:
        groups = parameter_groups(model, case.loop) if case.loop.groups > 1 else None
        config = with_budget(config_of(case, setting, folder), model, setting, device)
        engine = TrainingEngine(model, config, groups, device=device)
        engine.parts.schedule.speculation.patience = 0  # a case has few steps
        return engine
    finally:
        open_tiers.NvmeTier = tier  # type: ignore[misc]


def with_budget(config: Config, model: Net, setting: Setting, device: Device) -> Config:
    """Return the config with the budgets of the setting, which are shares of the bytes that it places elsewhere."""
    if setting.host is None and setting.host_params is None and setting.device is None:
        return config
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    plan = plan_model(model, config, groups, device, Communicator(device)).plan
    memory: dict[str, int] = {}
    if setting.host is not None:
        memory["host"] = plan.peak_of_host() + int(setting.host * plan.placement.nbytes.get("nvme", 0))
    if setting.host_params is not None:
        memory["host_params"] = int(setting.host_params * sum(unit.shard_numel for unit in plan.units))
    if setting.device is not None and setting.host is None:  # a late device's memory counts as the host's
        states = sum(nbytes for tier, nbytes in plan.placement.nbytes.items() if tier != "device")
        memory["device"] = 2 * (plan.peak_nbytes()["device"] + int(setting.device * states)) + 1
    section = config.infinity.model_copy(update={"memory": Memory(**memory)})
    return config.model_copy(update={"infinity": section})


@contextmanager
def opened(case: Case, setting: Setting, folder: Path) -> Iterator[EngineTrainer]:
    """An engine's trainer, which is closed at the end."""
    trainer = EngineTrainer(case, setting, folder)
    try:
        yield trainer
    finally:
        trainer.engine.close()

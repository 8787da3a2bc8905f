"""Runs of Accelerate's loop without and with DeepSpeedPlugin, for test_accelerate.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed
from hugging_face import gpt2, rows, run_cases
from torch.utils.data import DataLoader

from infinity.errors import UsageError


def make_accelerator(plugin: DeepSpeedPlugin | None, accumulation: int = 1) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(plugin is not None).lower()  # as its launcher
    return Accelerator(
        cpu=plugin is None,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulation,
    )


def rate(step: int) -> float:
    return 1 - step / 10


class Run:
    """A model, its optimizer and its data, prepared by an Accelerator."""

    def __init__(self, accelerator: Accelerator, in_config: bool = False, batch: int = 4) -> None:
        set_seed(0)
        self.accelerator, self.losses, self.norms = accelerator, [], []
        model = gpt2()
        optimizer: Any
        schedule: Any
        if in_config:
            optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
            schedule = DummyScheduler(
                optimizer, lr_scheduler_callable=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, rate)
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        loader: Any = DataLoader(rows(48), batch_size=batch)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def train(self, steps: int, first: int = 0, clip: float | None = 1.0) -> list[float]:
        for number, batch in enumerate(self.loader):
            if not first <= number < first + steps:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and clip is not None:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self.losses

    def results(self) -> dict[str, Any]:
        weights = self.accelerator.get_state_dict(self.model) or {}  # stage 3: on rank 0 only
        total = float(sum(value.double().abs().sum() for value in weights.values()))
        return {"losses": self.losses, "norms": self.norms, "weights": total, "names": sorted(weights)}


def plugins(accumulation: int = 1, clip: float = 1.0) -> dict[str, Any]:
    """Name → plugin, and True if the config has the optimizer."""

    def config(stage: int, **changes: Any) -> DeepSpeedPlugin:
        zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        keys = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": accumulation}
        content = {**keys, "gradient_clipping": clip, "zero_optimization": zero, **changes}
        return DeepSpeedPlugin(hf_ds_config=content)

    def arguments(stage: int) -> DeepSpeedPlugin:
        return DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clip,
            zero3_init_flag=False,
            zero3_save_16bit_model=True,
        )

    adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    return {
        "arguments 2": (lambda: arguments(2), False),
        "arguments 3": (lambda: arguments(3), False),
        "config 2": (lambda: config(2, optimizer=adam), True),
        "config 3": (lambda: config(3, optimizer=adam), True),
    }


def compare(accumulation: int = 1, clip: float = 1.0) -> dict[str, Any]:
    plain = Run(make_accelerator(None, accumulation))
    plain.train(9, clip=clip)
    found = {"plain": plain.results()}
    for name, (plugin, in_config) in plugins(accumulation, clip).items():
        ours = Run(make_accelerator(plugin(), accumulation), in_config)
        ours.train(9, clip=clip)
        found[name] = ours.results()
    return found


def steps(folder: Path) -> Any:
    return compare()


def accumulation(folder: Path) -> Any:
    return compare(accumulation=3, clip=0.5)


def states(folder: Path) -> Any:
    """`save_state` after 4 batches, 5 more, and those again after `load_state`."""
    found = {}
    for name, (plugin, in_config) in plugins().items():
        run = Run(make_accelerator(plugin()), in_config)
        run.train(4)
        run.accelerator.save_state(str(folder / name))
        run.train(5, first=4)
        other = Run(make_accelerator(plugin()), in_config)
        other.accelerator.load_state(str(folder / name))
        other.train(5, first=4)
        found[name] = [run.losses[4:], other.losses]
    return found


def weights(folder: Path) -> Any:
    """`save_model`, and `save_pretrained` of the unwrapped model with the gathered state dict."""
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    run = Run(make_accelerator(plugins()["config 3"][0]()), True)
    run.train(4)
    expected = run.accelerator.get_state_dict(run.model)
    run.accelerator.save_model(run.model, str(folder / "model"))
    unwrapped = run.accelerator.unwrap_model(run.model)
    unwrapped.save_pretrained(folder / "pretrained", state_dict=dict(expected))
    saved = load_file(folder / "model" / "model.safetensors")
    again = GPT2LMHeadModel.from_pretrained(folder / "pretrained").state_dict()
    kind = type(unwrapped).__name__
    moved = (expected["transformer.wte.weight"] - gpt2().state_dict()["transformer.wte.weight"]).abs().max().item()
    same = all(torch.equal(value, expected[name]) for name, value in (*saved.items(), *again.items()))
    return {"kind": kind, "same": same, "names": len(again), "moved": moved}


def wide(folder: Path) -> Any:
    """One process with batches of 8, for `ranks`."""
    run = Run(make_accelerator(None), batch=8)
    run.train(6)
    return run.results()


def ranks(folder: Path) -> Any:
    """Two steps of each plugin on the ranks that this was started with."""
    found = {}
    for name, (plugin, in_config) in plugins().items():
        run = Run(make_accelerator(plugin()), in_config)
        run.train(6)
        found[name] = run.results() | {"ranks": run.accelerator.num_processes}
    return found


def counted(folder: Path) -> Any:
    """Runs after a PartialState that was constructed before the plugin: its default, and with a backend."""
    found: dict[str, Any] = {}
    for backend in (None, "gloo"):
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
        PartialState(backend=backend)
        try:
            run = Run(Accelerator(deepspeed_plugin=plugins()["config 2"][0]()), in_config=True)
            run.train(6)
            found[str(backend)] = run.results()
        except UsageError as error:
            found[str(backend)] = str(error)
    return found


def launched(folder: Path) -> Any:
    """The plugin that `accelerate launch --use_deepspeed` describes in the environment."""
    accelerator = Accelerator()
    run = Run(accelerator)
    run.train(6)
    plugin = accelerator.state.deepspeed_plugin
    return run.results() | {"stage": plugin.zero_stage, "ranks": accelerator.num_processes}


if __name__ == "__main__":
    run_cases(globals())

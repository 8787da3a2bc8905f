"""Reports of training: events for the monitors, the times of a step, and the operations of one forward.

Sections `tensorboard`, `wandb`, `csv_monitor` and `flops_profiler` and key `wall_clock_breakdown` of the config switch
them on. Rank 0 reports; on other ranks, and where they are off, nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from infinity.observe.clock import ClockLog, Phase, StepClock
from infinity.observe.ledger import Ledger
from infinity.observe.log import logger
from infinity.observe.monitor import CSVFiles, Event, Monitor, TensorBoardFiles, WandBRun, Writer, open_monitor
from infinity.sizes import sum_in_order
from infinity.tiers.device import Device
from infinity.units.compiled import breaks_graphs, is_compiled

if TYPE_CHECKING:
    from infinity.config import Config

Forward: TypeAlias = Callable[..., Any]
Losses: TypeAlias = Sequence[tuple[torch.Tensor, int]]
"""Loss and divisor of every backward of a step; empty if not all are known."""

_TAG = "Train/Samples/"


def monitor_of(config: Config, *, main: bool) -> Monitor:
    """Open the config's monitors on the main rank. Raises ConfigError if a package is missing or a folder unusable."""
    makers: dict[str, Callable[[], Writer]] = {}
    if config.tensorboard.enabled:
        makers["tensorboard"] = partial(TensorBoardFiles, _folder(config.tensorboard))
    if config.wandb.enabled:
        makers["wandb"] = partial(WandBRun, config.wandb.project, config.wandb.group, config.wandb.team)
    if config.csv_monitor.enabled:
        makers["csv_monitor"] = partial(CSVFiles, _folder(config.csv_monitor))
    return open_monitor(makers if main else {})


def _folder(section: Any) -> Path:
    return Path(section.output_path, section.job_name)


class StepReports:
    """The reports of one training engine. main: this rank reports."""

    def __init__(self, config: Config, monitor: Monitor, ledger: Ledger, device: Device, *, main: bool) -> None:
        self.monitor = monitor
        self._losses: list[tuple[torch.Tensor, int]] = []
        """Loss and divisor of the step's calls of `engine.backward`; collected for monitors only."""
        self._last: torch.Tensor | None = None
        self._backwards = 0
        """Loss of the last call of `engine.backward`, and the number of them in this step."""
        self._ledger = ledger
        self._recorder = device.recorder
        self._clock = StepClock(device.torch_device) if config.wall_clock_breakdown and main else None
        self._clock_log: ClockLog | None = None
        if self._clock is not None:
            self._clock_log = ClockLog(ledger, device.recorder, config.steps_per_print or 1)
        self._flops = config.flops_profiler if config.flops_profiler.enabled and main else None
        self._torch_device = device.torch_device

    @property
    def active(self) -> bool:
        """True if `step` has something to report."""
        return self.monitor.enabled or self._clock is not None

    def add_loss(self, loss: torch.Tensor, divisor: int) -> None:
        """Collect the loss of a call of `engine.backward`."""
        self._last, self._backwards = loss.detach(), self._backwards + 1
        if self.monitor.enabled:
            self._losses.append((self._last, divisor))

    def known_losses(self, backwards: int) -> Losses:
        """Return the step's losses if all its `backwards` were calls of `engine.backward`, else nothing."""
        return self._losses if len(self._losses) == backwards else []

    def last_loss(self, backwards: int) -> torch.Tensor | None:
        """Return the last loss of the step, or None if not all its `backwards` were calls of `engine.backward`."""
        return self._last if self._backwards == backwards else None

    def forget_losses(self) -> None:
        """Begin another step."""
        self._losses, self._backwards = [], 0

    def around(self, called: nn.Module, model: nn.Module, steps: Callable[[], int]) -> Forward:
        """Return `called`, which runs `model`, with its measurements; `called` itself if there are none.

        steps: returns the number of steps so far.
        """
        if self._clock is None and self._flops is None:
            return called

        @breaks_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return called(*args, **kwargs)
            self.begin(Phase.FORWARD)
            try:
                if self._flops is not None and self._flops.profile_step == steps():
                    return self._count(called, model, partial(called, *args, **kwargs))
                return called(*args, **kwargs)
            finally:
                self.end(Phase.FORWARD)

        return forward

    def begin(self, phase: Phase) -> None:
        """Record that `phase` begins."""
        self.compute(phase.value)
        if self._clock is not None:
            self._clock.begin(phase)

    def end(self, phase: Phase) -> None:
        """Record that `phase` has ended."""
        self.compute("")
        if self._clock is not None:
            self._clock.end(phase)

    def compute(self, phase: str) -> None:
        """Record on the timeline that the model computes in `phase`; "": that it does not compute."""
        self._recorder.phase(phase)
        if self._recorder.is_on:
            self._recorder.sample(self._ledger.tier_bytes())

    def step(self, steps: int, samples: int, rate: float, losses: Losses, loss_scale: float | None) -> None:
        """Write the events of a step that has ended, and log its times.

        steps, samples: their numbers so far, this step included. rate, loss_scale: those of the next step.
        """
        events: list[Event] = []
        if self.monitor.enabled:
            if losses:
                loss = sum_in_order(self._recorder.loss(loss) / divisor for loss, divisor in losses)
                events.append((f"{_TAG}train_loss", loss, samples))
            events.append((f"{_TAG}lr", rate, samples))
            if loss_scale is not None:
                events.append((f"{_TAG}loss_scale", loss_scale, samples))
        if self._clock is not None and self._clock_log is not None:
            if events or self._clock_log.is_due(steps):
                with self._recorder.wait("compute", "loss"):
                    spent = self._clock.read()
                self._clock_log.step(steps, spent)
                events += [(f"{_TAG}elapsed_time_ms_{each.value}", 1000 * spent[each], samples) for each in spent]
            self._clock_log.expect(steps + 1)
        self.monitor.write_events(events)

    def _count(self, called: nn.Module, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run the one forward whose operations are counted, and report them."""
        settings, self._flops = self._flops, None
        assert settings is not None
        title = f"flops_profiler, step {settings.profile_step}"
        if is_compiled(called):
            logger.warning(
                "%s: nothing was counted, since the model is compiled and counting would run it eagerly", title
            )
            return forward()
        # Builds of torch for CUDA import Triton with their flop counter.
        from infinity.observe.flops import count_flops

        result, count = count_flops(model, forward, self._torch_device)
        lines = [f"{title}: {count.summary()}", *count.largest(settings.module_depth, settings.top_modules)]
        if settings.detailed:
            lines += count.tree()
        if settings.output_file is None:
            logger.info("\n".join(lines))
        else:
            _write_report(Path(settings.output_file), lines)
        return result


def _write_report(path: Path, lines: list[str]) -> None:
    """Write the lines to `path`; log them if that fails."""
    text = "\n".join(lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("flops_profiler.output_file was not written (%s):\n%s", error, text)

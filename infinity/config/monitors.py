"""Sections `tensorboard`, `wandb` and `csv_monitor`: where the loss, the rate and the gradient norm are written."""

from __future__ import annotations

from pydantic import field_validator

from infinity.config.fields import Section, Switch


class Monitor(Section):
    """Base of the monitors."""

    enabled: Switch = False
    """Write to this monitor. true is an error so far."""

    @field_validator("enabled")
    @classmethod
    def _not_here(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "must be false: monitors are not written yet. Log the loss, engine.get_global_grad_norm() and the rate "
                "in the training loop instead"
            )
        return value


class TensorBoard(Monitor):
    """TensorBoard."""

    output_path: str = ""
    """Folder of the event files; by default the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder of this run in `output_path`."""


class WandB(Monitor):
    """Weights & Biases."""

    group: str | None = None
    """Group of runs."""

    team: str | None = None
    """Team that owns the run."""

    project: str = "deepspeed"
    """Project of the run."""


class CSVMonitor(Monitor):
    """Files of comma-separated values."""

    output_path: str = ""
    """Folder of the files; by default the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder of this run in `output_path`."""

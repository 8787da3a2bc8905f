"""Sections `tensorboard`, `wandb`, `csv_monitor` and `flops_profiler`: reports of training, written by rank 0."""

from __future__ import annotations

from infinity.config.fields import Count, CountOrZero, Depth, Section, Switch


class Monitor(Section):
    """Base of the monitors."""

    enabled: Switch = False
    """Write the loss, the learning rate and the loss scale of every step."""


class TensorBoard(Monitor):
    """TensorBoard. Needs the package `tensorboard`."""

    output_path: str = ""
    """Folder of the event files; by default the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder of this run in `output_path`."""


class WandB(Monitor):
    """Weights & Biases. Needs the package `wandb`."""

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


class FlopsProfiler(Section):
    """Count of the operations of one forward."""

    enabled: Switch = False
    """Count the floating-point operations of one forward, and log them."""

    profile_step: CountOrZero = 1
    """Number of steps before the one whose first forward is counted."""

    module_depth: Depth = -1
    """Depth of the module tree down to which the classes with the most operations are listed; -1: all of it."""

    top_modules: Count = 1
    """Number of classes listed for each depth."""

    detailed: Switch = True
    """List every module with operations, too."""

    output_file: str | None = None
    """File that gets the report instead of the log."""
